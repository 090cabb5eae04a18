// How alike are sentences? The cosine of their mean vectors, as a heat map.

import { brief } from "./codepoints.js";
import { field, heated, make } from "./elements.js";

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
  lead: "One sentence a line. Each becomes a vector, and the darker a cell, the closer the two point the same way.",
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
  const others = similarity.flatMap((row, i) => row.filter((_, j) => i !== j));
  // Cosines of one encoder crowd into a narrow range, so the shades span what is there.
  const [low, high] = [Math.min(...others), Math.max(...others)];
  const heat = (value) => Math.min(1, (value - low) / (high - low || 1));
  const columns = texts.map((text, i) => make("th", { scope: "col", title: text }, String(i + 1)));
  const rows = similarity.map((row, i) => {
    const cells = row.map((value, j) => cell(value, heat(value), `${texts[i]} – ${texts[j]}`));
    const number = make("span", { class: "number" }, String(i + 1));
    const name = make("span", { class: "numbered" }, number, make("span", {}, texts[i]));
    return make("tr", {}, make("th", { scope: "row", title: texts[i] }, name), ...cells);
  });
  const head = make("thead", {}, make("tr", {}, make("td"), ...columns));
  const table = make("table", { class: "heat" }, head, make("tbody", {}, ...rows));
  const frame = make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Similarity matrix" }, table);
  const closest = nearest(similarity, texts);
  result.replaceChildren(frame, closest);
  return closest.textContent;
}

function cell(value, heat, title) {
  return heated(make("td", { title }, value.toFixed(2)), 0.06 + 0.94 * heat);
}

function nearest(similarity, texts) {
  const pairs = texts.flatMap((_, i) => texts.slice(i + 1).map((__, k) => [similarity[i][i + 1 + k], i, i + 1 + k]));
  const [value, i, j] = pairs.reduce((best, pair) => (pair[0] > best[0] ? pair : best));
  const [one, other] = [brief(texts[i]), brief(texts[j])];
  return make("p", { class: "lead nearest" }, `Closest: “${one}” and “${other}”, ${value.toFixed(2)}.`);
}
