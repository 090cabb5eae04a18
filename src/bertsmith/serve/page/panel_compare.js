// How alike are sentences? The cosine of their mean vectors, as a heat map.

import { field, make } from "./elements.js";
import { closestPair, heatLegend, heatTable } from "./heat_table.js";

const EXAMPLES = [
  [
    "Mixed",
    "The cat sat on the mat.\nA dog slept on the rug.\nShares fell sharply on Monday.\n" +
      "The stock market lost ground.\nThe recipe needs two eggs and some flour.",
  ],
  [
    "Weather",
    "It rained all night.\nThe night was wet.\nThe sun shone at noon.\n" +
      "Her train was late again.\nThe bus did not come on time.",
  ],
];
const MOST = 20;

export const compare = {
  id: "compare",
  title: "Compare sentences",
  group: "Ask",
  abilities: ["embed"],
  lead: "One sentence a line. Each becomes a vector; the stronger the colour of a cell, the more its two point the same way.",
  absence: "Any model can do this.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const text = field("Sentences", { lines: 5, value: EXAMPLES[0][1] });
  frame.inputs.append(text.root);
  frame.tools([], EXAMPLES.map(([name, value]) => [name, () => (text.box.value = value)]));
  function body() {
    const texts = text.box.value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (texts.length < 2) return "Write two sentences or more, one a line.";
    return texts.length > MOST ? `At most ${MOST} sentences, please.` : { texts };
  }
  frame.live("compare", body, (reply, { texts }) => show(frame.result, reply.similarity, texts), 350);
}

function show(result, similarity, texts) {
  const name = { tabindex: "0", role: "region", "aria-label": "Similarity matrix" };
  const frame = make("div", { class: "wide", ...name }, heatTable(similarity, texts));
  const closest = closestPair(similarity, texts);
  result.replaceChildren(frame, heatLegend(), closest);
  return closest.textContent;
}
