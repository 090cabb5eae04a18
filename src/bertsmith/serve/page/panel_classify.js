// What kind of text is this? One text or a pair, by whatever the model was fine-tuned for.

import { bars, spoken } from "./bars.js";
import { field, make } from "./elements.js";
import { openedWhy, whySection } from "./why_words.js";

const SINGLE = [
  {
    name: "A dancer",
    texts: ["A stunning ballet dancer, and a film that never once loses its rhythm.", ""],
    notice: "Press “Why?”: which single word, left out, takes most of the certainty away?",
  },
  {
    name: "But",
    texts: ["The story is dull, but the acting is wonderful.", ""],
    notice: "Press “Why?”: “but” carries the verdict with “wonderful”. Swap the halves, and it turns round.",
  },
  {
    name: "Not bad",
    texts: ["Not bad at all: I laughed more than I had expected to.", ""],
    notice: "What it gets wrong: this is praise. Delete “Not bad at all:” and it turns: a small model hears a complaint in it.",
  },
];
const PAIRS = [
  {
    name: "A pair",
    texts: ["A man is playing the guitar on a stage.", "Someone is making music."],
    notice: "Swap the two sentences: the first follows from the second no longer.",
  },
  {
    name: "Against",
    texts: ["The shop closes at six on Saturdays.", "You can buy bread there on Saturday night."],
    notice: "No word of the second denies the first: the model has to know that night is after six.",
  },
];
// Labels of the pair tasks of GLUE, SNLI and SICK; a model of one score is one of those too (STS-B, SICK-R).
const OF_PAIRS = /entail|contradict|equivalent|duplicate/i;

export const classify = {
  id: "classify",
  title: "Classify",
  group: "Ask",
  abilities: ["classify", "score"],
  lead: "A mood, a topic, or the relation of two sentences: the classes that the model was fine-tuned for.",
  absence: "Classifying requires a model that was fine-tuned on labelled texts: a task of GLUE, or your own table.",
  remedy: ["bertsmith finetune sst2 --data glue/SST-2 --out runs/sst2", "bertsmith serve --model sst2=runs/sst2"],
  build,
};

function build(frame) {
  const first = field("Text", { lines: 2 });
  const second = field("Second text, for models of pairs", { lines: 2 });
  const set = ({ texts: [one, two] }) => ((first.box.value = one), (second.box.value = two));
  frame.inputs.append(first.root, second.root);
  const examples = [...SINGLE, ...PAIRS];
  const chips = frame.tools([], examples.map((example) => ({ ...example, set: () => set(example) })));
  frame.keep("text", first.box);
  frame.keep("second", second.box);
  frame.carries(first.box);
  const opened = openedWhy(frame);
  function starting() {
    const { pairs, single } = frame.model;
    set(readsPairs(frame.model) ? PAIRS[0] : SINGLE[0]);
    second.root.hidden = !pairs;
    chips.forEach((chip, place) => (chip.hidden = PAIRS.includes(examples[place]) ? !pairs : !single));
  }
  frame.chooser.box.addEventListener("change", starting);
  starting();
  function body() {
    const [one, two] = [first.box.value, second.box.value];
    if (!one.trim()) return "Write a text.";
    if (!two.trim() && !frame.model.single) return "Write a second text: this model reads pairs.";
    return { texts: [two.trim() ? [one, two] : one] };
  }
  frame.live("classify", body, ({ results }, { texts: [text] }, { place, model }) => {
    const said = show(place, results[0]);
    const parts = typeof text === "string" ? [text] : text;
    const ask = (signal) => frame.ask("look/words", asWords(parts), signal, model);
    place.append(whySection(ask, parts, opened));
    return said;
  });
}

const asWords = ([first, second]) => ({ first, second: second ?? null });

function readsPairs({ abilities, labels, pairs, single }) {
  if (!pairs || !single) return pairs;
  return !abilities.includes("classify") || labels.some((label) => OF_PAIRS.test(label));
}

function show(result, found) {
  if (found.score !== undefined) return showScore(result, found.score);
  const entries = Object.entries(found.probabilities).sort(([, one], [, other]) => other - one);
  const labels = found.labels ?? [found.label];
  const said = labels.map(readable).join(", ") || "none of its labels";
  const verdict = make("p", { class: "verdict" }, said);
  const card = make("section", { class: "card" }, bars(entries.map(([label, share]) => [readable(label), share])));
  result.replaceChildren(verdict, card);
  return spoken(entries);
}

function showScore(result, score) {
  const number = score.toFixed(2);
  result.replaceChildren(
    make("p", { class: "verdict" }, number),
    make("p", { class: "lead" }, "The model gives one number, on the scale of its training data."),
  );
  return `Score ${number}`;
}

const readable = (label) => label.replaceAll("_", " ");
