// Attention: which tokens each head of each layer looks at.

import { choice, field, make } from "./elements.js";
import { attentionLines } from "./attention_lines.js";
import { headGrid } from "./attention_grid.js";

const EXAMPLES = [
  ["Animal", "The animal did not cross the street because it was too tired.", ""],
  ["A pair", "The cat sat on the mat.", "It purred and fell asleep."],
  ["Who gave?", "Maria gave her brother the book that he had wanted.", ""],
];

export const attention = {
  id: "attention",
  title: "Attention",
  group: "Look inside",
  abilities: ["look"],
  lead:
    "Every head of every layer decides, for each token, which tokens to read from. " +
    "Choose a head, then a token on the left.",
  absence: "Any model can do this.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const first = field("A", { lines: 2, value: EXAMPLES[0][1] });
  const second = field("B, if there is one", { lines: 2, value: "" });
  frame.inputs.append(make("div", { class: "pair" }, first.root, second.root));
  frame.tools([], EXAMPLES.map(([name, one, two]) => [name, () => ((first.box.value = one), (second.box.value = two))]));
  const chosen = { layer: 1, head: 0, token: 10 };
  function body() {
    if (!first.box.value.trim()) return "Write a text.";
    return { first: first.box.value, second: second.box.value.trim() ? second.box.value : null };
  }
  frame.live("look/attention", body, (reply) => show(frame, reply, chosen), 350);
}

function show(frame, reply, chosen) {
  const settle = (name, count) => (chosen[name] = Math.min(chosen[name], count - 1));
  settle("layer", reply.layers);
  settle("head", reply.heads);
  settle("token", reply.tokens.length);
  const lines = attentionLines(reply.tokens, (token) => (chosen.token = token));
  const grid = headGrid(reply, (layer, head) => turnTo({ layer, head }));
  const layer = choice("Layer", numbered(reply.layers), { change: () => turnTo({ layer: Number(layer.box.value) }) });
  const head = choice("Head", numbered(reply.heads), { change: () => turnTo({ head: Number(head.box.value) }) });
  function turnTo(wanted) {
    Object.assign(chosen, wanted);
    layer.box.value = String(chosen.layer);
    head.box.value = String(chosen.head);
    grid.mark(chosen.layer, chosen.head);
    lines.show(reply.weights[chosen.layer][chosen.head], chosen.token);
  }
  const controls = make("div", { class: "row" }, layer.root, head.root);
  const overview = make("section", { class: "card" }, make("h3", {}, "All heads"), grid.root);
  const close = make("section", { class: "card close" }, controls, lines.root);
  frame.result.replaceChildren(make("div", { class: "split attention" }, close, overview));
  turnTo({});
  return `${reply.tokens.length} tokens, ${reply.layers} layers of ${reply.heads} heads.`;
}

const numbered = (count) => Array.from({ length: count }, (_, number) => [String(number), String(number + 1)]);
