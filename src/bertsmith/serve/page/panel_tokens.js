// What BERT sees: tokens, the three embeddings that are added up, and a fresh masking.

import { field, make, quoted } from "./elements.js";

const EXAMPLES = [
  ["A pair", "My dog is cute.", "He likes playing in the snow."],
  ["Rare words", "The blacksmith unhooked the samovar.", "Its chimney clattered quixotically."],
  ["Emoji", "We had ramen 🍜 in Kyōto.", "It was unforgettable!"],
];
const FATES = {
  mask: "hidden behind the mask token",
  random: "swapped for a random token",
  kept: "left as it is",
};

export const tokens = {
  id: "tokens",
  title: "What BERT sees",
  group: "Look inside",
  abilities: ["look"],
  lead:
    "Text becomes pieces of words; each piece is the sum of three vectors. " +
    "In training 15 % of them are chosen to be guessed: of these 80 % are hidden, 10 % swapped, 10 % left alone.",
  absence: "Any model can do this.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const first = field("A", { lines: 2, value: EXAMPLES[0][1] });
  const second = field("B, if there is one", { lines: 2, value: EXAMPLES[0][2] });
  let seed = Math.floor(Math.random() * 1e6);
  const redraw = () => ((seed += 1), frame.refresh({ now: true }));
  const button = make("button", { type: "button", click: redraw }, "Draw another masking");
  frame.inputs.append(make("div", { class: "pair" }, first.root, second.root));
  frame.tools([button], EXAMPLES.map(([name, one, two]) => [name, () => ((first.box.value = one), (second.box.value = two))]));
  function body() {
    if (!first.box.value.trim()) return "Write a text.";
    return { first: first.box.value, second: second.box.value.trim() ? second.box.value : null, seed };
  }
  frame.live("look/tokens", body, (reply) => show(frame.result, reply.tokens));
}

function show(result, seen) {
  const count = (fate) => seen.filter(({ masking }) => masking === fate).length;
  const entry = ([fate, text]) => make("li", { class: `fate-${fate}` }, `${text} × ${count(fate)}`);
  const fates = Object.entries(FATES).map(entry);
  const names = ["", "token", "segment", "position"].map((row) => make("span", {}, row));
  const rows = make("li", { class: "token rows", "aria-hidden": "true" }, ...names);
  const summary = `${seen.length - count("")} of ${seen.length} tokens are to be guessed.`;
  result.replaceChildren(
    make("p", { class: "lead" }, summary),
    make("ul", { class: "legend" }, ...fates),
    make("ol", { class: "tokens" }, rows, ...seen.map(column)),
  );
  return summary;
}

function column({ text, id, segment, position, masking, shown }) {
  const changed = masking === "mask" || masking === "random";
  const was = make("span", { class: "was" }, quoted(changed ? text : masking));
  const title = `${text}, id ${id}${masking ? `: ${FATES[masking]}` : ""}`;
  return make(
    "li",
    { class: masking ? `token fate-${masking}` : "token", title },
    was,
    make("span", { class: "piece" }, quoted(changed ? shown : text)),
    make("span", { class: `segment segment-${segment % 2}` }, "AB"[segment] ?? String(segment)),
    make("span", { class: "position" }, String(position)),
  );
}
