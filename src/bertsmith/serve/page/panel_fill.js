// Fill the blank: guesses for each mask while you type.

import { bars, spoken } from "./bars.js";
import { blanksSentence } from "./blanks_sentence.js";
import { replace } from "./codepoints.js";
import { tick } from "./controls.js";
import { field, make } from "./elements.js";
import { guessesTable } from "./guesses_table.js";

const EXAMPLES = [
  {
    name: "Capital",
    text: "Paris is the [MASK] of France.",
    notice: "Tick “Layer by layer”: which guesses come before “capital”, and after which layer does it appear?",
  },
  {
    name: "Two blanks",
    text: "The king was [MASK] by his son and [MASK] in the church.",
    notice: "Put a guess into the first blank and watch the second change: each is read with the other.",
  },
  {
    name: "A book",
    text: "He opened the [MASK] and read the first chapter.",
    notice: "The words after the blank show what he opened: BERT reads both sides. Delete the end and see.",
  },
  {
    name: "Doctor",
    text: "The doctor told him to [MASK] more water.",
    notice: "Hide “water” as well: without it, many more verbs are possible.",
  },
  {
    name: "Numbers",
    text: "A spider has [MASK] legs.",
    notice: "What it gets wrong: a small model knows that this is a number, but guesses which.",
  },
];

export const fill = {
  id: "fill",
  title: "Fill the blank",
  group: "Ask",
  abilities: ["fill"],
  lead:
    "Hide a word and BERT guesses it from both sides. " +
    "Type, press a word to hide it, or press a guess to put it in.",
  absence: "Guessing hidden words requires a pre-trained model with its masked-language head.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const maskOf = () => frame.model.mask ?? "[MASK]";
  const text = field("Text", { lines: 2, value: "", class: "brief" });
  const set = (value) => {
    text.box.value = value;
    frame.changed({ now: true });
  };
  const insert = make("button", { type: "button", click: () => insertMask(text.box, maskOf(), set) }, "Insert a blank");
  frame.inputs.append(text.root);
  const start = (value) => (text.box.value = value.replaceAll("[MASK]", maskOf()));
  const layered = tick("Layer by layer");
  frame.tools([insert, layered.root], EXAMPLES.map((example) => ({ ...example, set: () => start(example.text) })));
  start(EXAMPLES[0].text);
  frame.keep("text", text.box);
  frame.keep("layers", layered.box);
  const guessed = []; // the best guesses, which replace the blanks in panels without blanks
  frame.carries(text.box, {
    give: (value) => guessed.reduce((filled, token) => filled.replace(maskOf(), token), value),
    take: (value) => value,
  });

  function question() {
    if (text.box.value.includes(maskOf())) return { text: text.box.value, top: 6 };
    return `Put a blank into the text: press a word, “Insert a blank”, or write ${maskOf()}.`;
  }
  let pressed = null; // the code point to whose successor the focus goes
  function sentenceOf(value, masks, turnTo) {
    // What was typed since then must not be lost: a press counts only while the result is that of the text.
    const change = (start, end, by) => {
      if (text.box.value !== value) return;
      pressed = start;
      set(replace(value, start, end, by));
    };
    const sentence = blanksSentence(value, masks, { hide: (first, end) => change(first, end, maskOf()), turnTo });
    return { sentence, change };
  }
  function putUp(place, sentence, ...below) {
    const left = frame.result.contains(document.activeElement) || document.activeElement === document.body;
    place.replaceChildren(sentence.root, ...below);
    sentence.showFirst();
    if (pressed !== null && left) sentence.focusAt(pressed);
    pressed = null;
  }
  function show(reply, asked, { place, model }) {
    const turnTo = (number) => cards[number].querySelector("button").focus();
    const { sentence, change } = sentenceOf(asked.text, reply.masks, turnTo);
    const put = (mask, token) => change(...joined(asked.text, mask, token));
    const cards = reply.masks.map((mask, number) => guesses(mask, number, (token) => put(mask, token)));
    guessed.splice(0, Infinity, ...reply.masks.map((mask) => mask.guesses[0].token));
    const below = make("div", { class: "cards layered" });
    putUp(place, sentence, make("div", { class: "cards" }, ...cards), below);
    if (layered.box.checked) showLayers(below, asked.text, model);
    return reply.masks.map((mask, number) => `Blank ${number + 1}: ${spoken(pairs(mask))}`).join(". ");
  }
  async function showLayers(place, value, model) {
    await frame.aside(async () => {
      const { masks } = await frame.ask("look/guesses", { text: value }, undefined, model);
      place.replaceChildren(...masks.map(guessesTable));
    });
  }
  frame.idle = () => {
    if (text.box.value.trim()) putUp(frame.result, sentenceOf(text.box.value, [], () => {}).sentence);
    return Boolean(text.box.value.trim());
  };
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

function insertMask(box, mask, set) {
  const { selectionStart, selectionEnd, value } = box;
  const before = value.slice(0, selectionStart);
  const after = value.slice(selectionEnd);
  const padded = `${/\S$/.test(before) ? " " : ""}${mask}${/^[\p{L}\p{N}]/u.test(after) ? " " : ""}`;
  set(before + padded + after);
  box.focus();
  box.setSelectionRange(selectionStart + padded.length, selectionStart + padded.length);
}
