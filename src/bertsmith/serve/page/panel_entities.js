// Names and other spans, marked in the text; or the tag of every word.

import { pieces } from "./codepoints.js";
import { choice, field, make, percent } from "./elements.js";

const COLOURS = 6; // as many as style sheets name .tint-0, .tint-1 ...
const EXAMPLES = [
  {
    name: "Apple",
    text: "Tim Cook of Apple was in Dublin, and he ate an apple.",
    notice: "One word twice, a company and a fruit. Write all of it small: does the model need the capitals?",
  },
  {
    name: "Science",
    text: "Marie Curie was born in Warsaw and won the Nobel Prize at the University of Paris.",
    notice: "What it gets wrong: “University of Paris” is one name. Where does a small model cut it?",
  },
  {
    name: "With emoji",
    text: "Off to London 🇬🇧 and then Paris 🗼 with the whole band!",
    notice: "The marks cover the names exactly, with any characters between them.",
  },
];

export const entities = {
  id: "entities",
  title: "Find names",
  group: "Ask",
  abilities: ["tag"],
  lead: "People, places and everything else that the model was trained to mark, shown in your text.",
  absence: "Marking names requires a model that was fine-tuned on tagged words, such as CoNLL-2003.",
  remedy: ["bertsmith finetune ner --data conll/ --out runs/ner", "bertsmith serve --model ner=runs/ner"],
  build,
};

function build(frame) {
  const text = field("Text", { lines: 3, value: EXAMPLES[0].text });
  const view = choice("Show", [["entities", "Names"], ["words", "Every word"]]);
  const suit = () => (view.box.value = marksNames(frame.model) ? "entities" : "words");
  frame.chooser.box.addEventListener("change", suit);
  suit();
  frame.inputs.append(text.root);
  frame.tools([view.root], EXAMPLES.map((example) => ({ ...example, set: () => (text.box.value = example.text) })));
  frame.keep("text", text.box);
  frame.keep("show", view.box);
  frame.carries(text.box);
  const body = () => (text.box.value.trim() ? { texts: [text.box.value] } : "Write a text.");
  frame.live("tag", body, (reply, asked, { place, model }) => {
    const spans = view.box.value === "words" ? tagged(reply.results[0]) : reply.results[0].entities;
    return show(place, asked.texts[0], spans, model.labels);
  });
}

const marksNames = ({ labels }) => labels.some((label) => /^[BIES]-/.test(label));
const tagged = ({ words }) =>
  words.filter(({ tag }) => tag !== "O").map(({ tag, ...word }) => ({ ...word, label: tag }));

function show(result, text, spans, labels) {
  const kinds = [...new Set(labels.map(kind))].filter((each) => each !== "O");
  const tint = (label) => `tint-${Math.max(0, kinds.indexOf(kind(label))) % COLOURS}`;
  const parts = pieces(text, spans).map(({ text: piece, span }) => {
    if (!span) return piece;
    const title = `${span.label}, ${percent(span.probability)}`;
    return make("mark", { class: `entity ${tint(span.label)}`, title }, piece, make("small", { dir: "auto" }, span.label));
  });
  result.replaceChildren(make("p", { class: "passage roomy", dir: "auto" }, ...parts), legend(spans, tint));
  return spans.length ? spans.map((span) => `${span.text}: ${span.label}`).join(", ") : "Nothing is marked.";
}

const kind = (label) => label.replace(/^[BIES]-/, "");

function legend(spans, tint) {
  const counts = new Map();
  for (const { label } of spans) counts.set(label, (counts.get(label) ?? 0) + 1);
  if (!counts.size) return make("p", { class: "lead" }, "The model marks nothing in this text.");
  const entries = [...counts].map(([label, count]) => make("li", { class: tint(label) }, `${label} × ${count}`));
  return make("ul", { class: "legend" }, ...entries);
}
