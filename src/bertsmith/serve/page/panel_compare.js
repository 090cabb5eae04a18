// How alike are sentences? The cosine of their mean vectors, as a heat map.

import { layerSlider, saveButtons, tick } from "./controls.js";
import { field, make } from "./elements.js";
import { closestPair, heatLegend, heatTable } from "./heat_table.js";
import { matrixPicture } from "./pictures.js";

const EXAMPLES = [
  {
    name: "Mixed",
    text:
      "The cat sat on the mat.\nA dog slept on the rug.\nShares fell sharply on Monday.\n" +
      "The stock market lost ground.\nThe recipe needs two eggs and some flour.",
    notice: "Which sentences are close without sharing a word?",
  },
  {
    name: "Weather",
    text:
      "It rained all night.\nThe night was wet.\nThe sun shone at noon.\n" +
      "Her train was late again.\nThe bus did not come on time.",
    notice: "Rain, sun and two delays. Tick “Less their mean”: which pairs come out, and which sentence stays alone?",
  },
];
const MOST = 20;

export const compare = {
  id: "compare",
  title: "Compare sentences",
  group: "Ask",
  abilities: ["embed"],
  lead: "One sentence per line. Each becomes a vector; the stronger the colour of a cell, the more its two point the same way.",
  absence: "Any model can do this.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const text = field("Sentences", { lines: 5, value: EXAMPLES[0].text });
  frame.inputs.append(text.root);
  const layered = tick("Layer by layer");
  const centred = tick("Less their mean", { title: "Subtract the part that all tokens share before comparing" });
  const set = (example) => (text.box.value = example.text);
  frame.tools([layered.root, centred.root], EXAMPLES.map((example) => ({ ...example, set: () => set(example) })));
  frame.keep("text", text.box);
  frame.keep("layers", layered.box);
  frame.keep("centred", centred.box);
  const chosen = { layer: null };
  frame.keep("layer", { get: () => chosen.layer ?? "", set: (value) => (chosen.layer = Number(value)) });
  frame.carries(text.box, { give: (value) => value.split("\n", 1)[0], take: withFirst });
  function body() {
    const texts = text.box.value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (texts.length < 2) return "Write two sentences or more, one per line.";
    return texts.length > MOST ? `At most ${MOST} sentences, please.` : { texts };
  }
  const isLayered = () => layered.box.checked || centred.box.checked;
  function show(reply, { texts }, { place }) {
    if (!reply.layers) return showMatrix(place, reply.similarity, texts);
    const matrix = make("div");
    const cosines = ({ similarity, centred: less }) => (centred.box.checked ? less : similarity);
    const turnTo = (layer) => showMatrix(matrix, cosines(reply.layers[layer]), texts);
    const slider = layerSlider((layer) => ((chosen.layer = layer), frame.remember(), turnTo(layer)), {
      first: "the words alone",
    });
    place.replaceChildren(slider.root, matrix);
    return turnTo(slider.fit(reply.layers.length - 1, chosen.layer ?? undefined));
  }
  frame.live(() => (isLayered() ? "look/similarity" : "compare"), body, show, 350);
}

/** The lines with the first replaced, where it is not among them already. */
function withFirst(sentence, lines) {
  const [, ...others] = lines.split("\n");
  return lines.split("\n").includes(sentence) ? lines : [sentence, ...others].join("\n");
}

function showMatrix(place, similarity, texts) {
  const name = { tabindex: "0", role: "region", "aria-label": "Similarity matrix" };
  const frame = make("div", { class: "wide", ...name }, heatTable(similarity, texts));
  const closest = closestPair(similarity, texts);
  const save = saveButtons(() => matrixPicture(similarity, texts), "similarity");
  place.replaceChildren(frame, make("div", { class: "row" }, heatLegend(), save), closest);
  return closest.textContent;
}
