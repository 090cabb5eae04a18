// Fill the blank: guesses for each mask while you type.

import { bars, spoken } from "./bars.js";
import { pieces, replace } from "./codepoints.js";
import { field, make } from "./elements.js";

const EXAMPLES = [
  ["Capital", "Paris is the [MASK] of France."],
  ["Two blanks", "The king was [MASK] by his son and [MASK] in the church."],
  ["A book", "He opened the [MASK] and read the first chapter."],
  ["Doctor", "The doctor told him to [MASK] more water."],
];
const WORD = /[\p{L}\p{N}][\p{L}\p{M}\p{N}'’]*/gu;

export const fill = {
  id: "fill",
  title: "Fill the blank",
  group: "Ask",
  abilities: ["fill"],
  lead:
    "Hide a word and BERT guesses it from both sides. " +
    "Type, press a word to hide it, or press a guess to put it in.",
  absence: "Guessing hidden words takes a pre-trained model with its masked-language head.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const maskOf = () => frame.model.mask ?? "[MASK]";
  const text = field("Text", { lines: 2, value: "" });
  const set = (value) => {
    text.box.value = value;
    frame.refresh({ now: true });
  };
  const insert = make("button", { type: "button", click: () => insertMask(text.box, maskOf(), set) }, "Insert a blank");
  frame.inputs.append(text.root);
  const start = (value) => (text.box.value = value.replaceAll("[MASK]", maskOf()));
  frame.tools([insert], EXAMPLES.map(([name, value]) => [name, () => start(value)]));
  start(EXAMPLES[0][1]);

  function question() {
    if (text.box.value.includes(maskOf())) return { text: text.box.value, top: 6 };
    return `Put a blank into the text: “Insert a blank”, or write ${maskOf()}.`;
  }
  function show(reply, asked) {
    // What was typed since then must not be lost: a press counts only while the result is that of the text.
    const change = (...how) => text.box.value === asked.text && set(replace(asked.text, ...how));
    const put = (mask, token) => change(...joined(asked.text, mask, token));
    const cards = reply.masks.map((mask, number) => guesses(mask, number, (token) => put(mask, token)));
    frame.result.replaceChildren(
      sentence(asked.text, reply.masks, (first, end) => change(first, end, maskOf())),
      make("div", { class: "cards" }, ...cards),
    );
    return reply.masks.map((mask, number) => `Blank ${number + 1}: ${spoken(pairs(mask))}`).join(". ");
  }
  frame.live("fill", question, show, 200);
}

const pairs = (mask) => mask.guesses.map(({ token, probability }) => [token, probability]);

function guesses(mask, number, pick) {
  const title = make("h3", {}, make("span", { class: "number" }, String(number + 1)), "Best guesses");
  return make("section", { class: "card" }, title, bars(pairs(mask), pick));
}

/** Where a token goes and how it is written: a piece that goes on with a word takes the space before it. */
function joined(text, { start, end }, token) {
  if (!token.startsWith("##")) return [start, end, token];
  const before = [...text][start - 1];
  return [before === " " ? start - 1 : start, end, token.slice(2)];
}

/** The text with its masks numbered, and every word a button that hides it. */
function sentence(text, masks, hide) {
  const numbered = masks.map((mask, number) => ({ ...mask, number }));
  const line = make("p", { class: "sentence", role: "group", "aria-label": "Press a word to hide it" });
  let start = 0;
  for (const { text: piece, span } of pieces(text, numbered)) {
    if (span) line.append(make("span", { class: "blank" }, String(span.number + 1)));
    else line.append(...words(piece, start, hide));
    start += [...piece].length;
  }
  return line;
}

function words(piece, offset, hide) {
  const found = [];
  let reached = 0;
  for (const match of piece.matchAll(WORD)) {
    const start = offset + [...piece.slice(0, match.index)].length;
    const end = start + [...match[0]].length;
    const look = { type: "button", class: "word", title: "Hide this word" };
    const button = make("button", { ...look, click: () => hide(start, end) }, match[0]);
    found.push(piece.slice(reached, match.index), button);
    reached = match.index + match[0].length;
  }
  return [...found, piece.slice(reached)];
}

function insertMask(box, mask, set) {
  const { selectionStart, selectionEnd, value } = box;
  const before = value.slice(0, selectionStart);
  const after = value.slice(selectionEnd);
  const padded = `${/\S$/.test(before) ? " " : ""}${mask}${/^[\p{L}\p{N}]/u.test(after) ? " " : ""}`;
  set(before + padded + after);
  box.focus();
  box.setSelectionRange(selectionStart + padded.length, selectionStart + padded.length);
}
