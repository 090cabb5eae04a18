// A sentence to hide words in: its blanks numbered, and every word a button.

import { pieces } from "./codepoints.js";
import { make, walkable } from "./elements.js";

const WORD = /[\p{L}\p{N}][\p{L}\p{M}\p{N}'’]*/gu;

/**
 * The text with its masks as numbered blanks. `hide(start, end)` hears which word was pressed, `turnTo(number)`
 * which blank; `focusAt(place)` moves the focus to what stands at this code point. It is one stop for Tab.
 */
export function blanksSentence(text, masks, { hide, turnTo }) {
  const root = make("p", { class: "sentence", role: "group", "aria-label": "Press a word to hide it", dir: "auto" });
  const items = [];
  let start = 0;
  for (const { text: piece, span } of pieces(text, masks.map((mask, number) => ({ ...mask, number })))) {
    const added = span ? [blank(span, turnTo)] : words(piece, start, hide);
    items.push(...added.filter((each) => each.element));
    root.append(...added.map((each) => each.element ?? each.text));
    start += [...piece].length;
  }
  const reach = walkable(items.map(({ element }) => element));
  function focusAt(place) {
    const number = items.findIndex((item) => item.start <= place && place < item.end);
    if (number < 0) return;
    reach(number);
    items[number].element.focus({ preventScroll: true });
  }
  return { root, focusAt, showFirst: () => showBlank(root) };
}

/** Scroll the sentence, not the page, so that its first blank is seen. */
function showBlank(root) {
  const first = root.querySelector(".blank");
  if (first) root.scrollTop += first.getBoundingClientRect().top - root.getBoundingClientRect().top - root.clientHeight / 2;
}

function blank({ start, end, number }, turnTo) {
  const name = `Blank ${number + 1}: to its guesses`;
  const look = { type: "button", class: "blank", title: name, "aria-label": name, click: () => turnTo(number) };
  return { element: make("button", look, String(number + 1)), start, end };
}

function words(piece, offset, hide) {
  const found = [];
  let reached = 0;
  for (const match of piece.matchAll(WORD)) {
    const start = offset + [...piece.slice(0, match.index)].length;
    const end = start + [...match[0]].length;
    const look = { type: "button", class: "word", title: "Hide this word", click: () => hide(start, end) };
    found.push({ text: piece.slice(reached, match.index) }, { element: make("button", look, match[0]), start, end });
    reached = match.index + match[0].length;
  }
  return [...found, { text: piece.slice(reached) }];
}
