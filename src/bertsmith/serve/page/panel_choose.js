// Which of several texts continues, or answers: a context and its options, one per line.

import { bars, spoken } from "./bars.js";
import { field, make, percent, quoted } from "./elements.js";

const EXAMPLES = [
  {
    name: "At the table",
    context: "The boy sits down at the table.",
    options: ["He eats an apple.", "He swims across the river.", "He flies over the roof."],
    notice: "Each option is read together with the context; only then are the three weighed.",
  },
  {
    name: "Why?",
    context: "The streets were wet in the morning. Why were they?",
    options: ["It had rained in the night.", "The sun had shone all day.", "The shop was closed."],
    notice: "Write a fourth option: the shares of all others change, because together they are 100 %.",
  },
];

export const choose = {
  id: "choose",
  title: "Choose",
  group: "Ask",
  abilities: ["choose"],
  lead: "A sentence and its possible continuations, or a question and its possible answers: the model compares them.",
  absence: "Choosing requires a model that was fine-tuned on questions with options, such as SWAG or RACE.",
  remedy: ["bertsmith finetune swag --data swag/ --out runs/swag", "bertsmith serve --model swag=runs/swag"],
  build,
};

function build(frame) {
  const context = field("Context", { lines: 2, value: EXAMPLES[0].context });
  const options = field("Options, one per line", { lines: 4, value: EXAMPLES[0].options.join("\n") });
  frame.inputs.append(context.root, options.root);
  const set = (example) => {
    context.box.value = example.context;
    options.box.value = example.options.join("\n");
  };
  frame.tools([], EXAMPLES.map((example) => ({ ...example, set: () => set(example) })));
  frame.keep("context", context.box);
  frame.keep("options", options.box);
  frame.carries(context.box);
  function body() {
    const among = options.box.value.split("\n").filter((line) => line.trim());
    if (!context.box.value.trim()) return "Write what all options share.";
    return among.length > 1 ? { context: context.box.value, options: among } : "Write two options or more, one per line.";
  }
  frame.live("choose", body, (reply, asked, { place }) => show(place, reply, asked.options));
}

function show(result, reply, options) {
  const entries = options.map((option, place) => [option, reply.probabilities[place]]);
  entries.sort(([, one], [, other]) => other - one);
  const share = make("span", { class: "quiet-number" }, percent(reply.probabilities[reply.index]));
  const verdict = make("p", { class: "verdict" }, quoted(reply.option), " ", share);
  result.replaceChildren(verdict, make("section", { class: "card" }, bars(entries)));
  return spoken(entries);
}
