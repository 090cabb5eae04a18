// Questions about a passage: the answer is marked in it.

import { pieces } from "./codepoints.js";
import { field, make, percent, quoted, withNumber } from "./elements.js";
import { openedWhy, whySection } from "./why_words.js";

const EXAMPLES = [
  {
    name: "Two prizes",
    question: "When did she win the prize for chemistry?",
    passage:
      "Marie Curie was born in Warsaw in 1867. She studied in Paris, where she met Pierre. In 1903 both won the " +
      "Nobel Prize for physics, and in 1911 she won a second one for chemistry.",
    notice: "The model points at where an answer begins and ends. Put “physics” for “chemistry”: the mark moves.",
  },
  {
    name: "Rivers",
    question: "Which city stands on the Thames?",
    passage:
      "Paris lies on both banks of the Seine 🛶, which winds through the city from the south-east to the west. " +
      "London stands on the Thames, and Vienna on the Danube.",
    notice: "Ask it the other way round, which river runs through London: is that as easy?",
  },
  {
    name: "No answer",
    question: "Who built the lighthouse?",
    passage:
      "The lighthouse stands on a cliff above the bay. It is painted in red and white, and its lamp can be " +
      "seen for twenty miles.",
    notice: "The passage does not say who. A model of SQuAD 1.1 must mark something; one of SQuAD 2.0 may say so.",
  },
  {
    name: "No because",
    question: "Why did Alyssa go to Miami?",
    passage:
      "Alyssa got to the beach after a long trip. She is from Charlotte and travelled from Atlanta. She is now " +
      "in Miami, where she went to visit some friends. But she wanted some time to herself at the beach, " +
      "so she went there first.",
    notice: "What it gets wrong: no word of the passage says “because”, and a small model marks half of it.",
  },
];

const NONE = "No answer in the passage";
const BY_THRESHOLD = "This is not the most probable: the model's threshold for no answer decided.";

export const answer = {
  id: "answer",
  title: "Find the answer",
  group: "Ask",
  abilities: ["answer"],
  lead: "Ask something that the passage answers. The model marks the answer, or finds that there is none.",
  absence: "Answering from a passage requires a model that was fine-tuned on questions, such as SQuAD.",
  remedy: ["bertsmith finetune squad2 --data squad/ --out runs/squad2", "bertsmith serve --model qa=runs/squad2"],
  build,
};

function build(frame) {
  const question = field("Question", { value: EXAMPLES[0].question });
  const passage = field("Passage", { lines: 5, value: EXAMPLES[0].passage });
  frame.inputs.append(question.root, passage.root);
  const set = (example) => ((question.box.value = example.question), (passage.box.value = example.passage));
  frame.tools([], EXAMPLES.map((example) => ({ ...example, set: () => set(example) })));
  frame.keep("question", question.box);
  frame.keep("passage", passage.box);
  frame.carries(passage.box);
  const opened = openedWhy(frame);
  function body() {
    const [asked, read] = [question.box.value, passage.box.value];
    if (!asked.trim()) return "Write a question.";
    return read.trim() ? { question: asked, passage: read, best: 5 } : "Write or paste a passage.";
  }
  frame.live(
    "answer",
    body,
    (reply, { question: first, passage: second }, { place, model }) => {
      const said = show(place, reply, second);
      const ask = (signal) => frame.ask("look/words", { first, second }, signal, model);
      place.append(whySection(ask, [first, second], opened));
      return said;
    },
    350,
  );
}

function show(result, reply, passage) {
  const found = reply.answers.filter(({ start }) => start >= 0);
  const candidates = [...found, ...noAnswer(reply)].sort((one, other) => other.probability - one.probability);
  const text = make("p", { class: "passage", dir: "auto" });
  const rows = candidates.map((each) => candidate(each, () => point(each)));
  function point(chosen) {
    rows.forEach((row, place) => row.setAttribute("aria-pressed", String(candidates[place] === chosen)));
    text.replaceChildren(...marked(passage, found, found.includes(chosen) ? chosen : null));
  }
  point(reply.no_answer ? candidates.find(({ start }) => start < 0) : found[0]);
  const list = make("div", { class: "candidates" }, ...rows);
  const others = make("section", { class: "card" }, make("h3", {}, "Best answers"), list);
  const split = make("div", { class: "split" }, text, rows.length ? others : null);
  const why = reply.decided_by_threshold ? [make("p", { class: "why" }, BY_THRESHOLD)] : [];
  result.replaceChildren(verdict(reply, found), ...why, split);
  return reply.no_answer ? "The passage does not say." : `The answer: ${found[0]?.text}`;
}

/** "No answer" as one more candidate, if the model was trained for it. */
function noAnswer({ no_answer_probability: probability }) {
  return Number.isFinite(probability) ? [{ text: NONE, start: -1, end: -1, probability }] : [];
}

function verdict(reply, found) {
  const chance = reply.no_answer ? reply.no_answer_probability : found[0]?.probability;
  const said = reply.no_answer || !found.length ? "The passage does not say." : quoted(found[0].text);
  const share = Number.isFinite(chance) ? make("span", { class: "quiet-number" }, percent(chance)) : null;
  return make("p", { class: reply.no_answer ? "verdict unsure" : "verdict" }, said, " ", share);
}

function candidate({ text, start, probability }, point) {
  const name = make("span", { class: start < 0 ? "none" : "" }, quoted(text));
  const parts = [name, make("span", { class: "bar-share" }, percent(probability))];
  const track = withNumber(make("span", { class: "bar-track", "aria-hidden": "true" }), "--share", probability);
  const pointing = { click: point, mouseenter: point, focus: point };
  return make("button", { type: "button", class: "candidate", ...pointing }, ...parts, track);
}

/** The passage with the chosen answer marked, and the others faintly where they do not meet it. */
function marked(passage, found, chosen) {
  const apart = (span) => span !== chosen && (!chosen || span.end <= chosen.start || span.start >= chosen.end);
  const spans = [...(chosen ? [chosen] : []), ...found.filter(apart)];
  return pieces(passage, spans).map(({ text, span }) => {
    if (!span) return text;
    return make("mark", { class: span === chosen ? "chosen" : "faint" }, text);
  });
}
