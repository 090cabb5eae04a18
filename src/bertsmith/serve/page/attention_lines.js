// One head: the tokens twice, side by side, with lines from each to what it reads.

import { draw, heated, make, percent, quoted, walkable, withNumber } from "./elements.js";

const ROW = 28; // pixels, as in the style sheet
const WIDTH = 100;
const FAINTEST = 0.02; // lines below this weight only cloud the picture

/** The picture of one head: `show(weights, token)` fills it; `pick(token)` hears which token was chosen. */
export function attentionLines(tokens, pick) {
  let weights = [];
  const from = tokens.map((text, place) => fromToken(text, () => look(place)));
  const to = tokens.map((text) => make("li", { class: "to" }, make("span", { class: "to-share" }), quoted(text)));
  const viewBox = `0 0 ${WIDTH} ${tokens.length * ROW}`;
  const lines = draw("svg", { class: "lines", viewBox, preserveAspectRatio: "none", "aria-hidden": "true" });
  const spoken = make("p", { class: "lead", role: "status" });
  const reach = walkable(from);

  function look(token) {
    pick(token);
    reach(token);
    from.forEach((button, place) => button.setAttribute("aria-pressed", String(place === token)));
    to.forEach((item, place) => light(item, weights[token][place]));
    for (const line of lines.children) line.classList.toggle("lit", Number(line.dataset.from) === token);
    spoken.textContent = sentence(tokens, weights[token], token);
  }
  function show(of, token) {
    weights = of;
    const fan = (row, source) => row.flatMap((weight, target) => line(source, target, weight));
    lines.replaceChildren(...weights.flatMap(fan));
    look(token);
  }
  const columns = [
    make("div", { class: "from-list", role: "group", "aria-label": "Choose a token" }, ...from),
    lines,
    make("ol", { class: "to-list", "aria-label": "What it reads" }, ...to),
  ];
  return { root: make("div", {}, spoken, make("div", { class: "weave" }, ...columns)), show };
}

function fromToken(text, choose) {
  return make("button", { type: "button", class: "from", mouseenter: choose, focus: choose, click: choose }, quoted(text));
}

function light(item, weight) {
  heated(item, Math.sqrt(weight)); // as in the small maps: most weights are small
  item.firstChild.textContent = weight < 0.01 ? "" : percent(weight);
}

function line(source, target, weight) {
  if (weight < FAINTEST) return [];
  const [y1, y2] = [source, target].map((place) => (place + 0.5) * ROW);
  const drawn = draw("line", { x1: 0, x2: WIDTH, y1, y2, "data-from": source, "vector-effect": "non-scaling-stroke" });
  return [withNumber(drawn, "--weight", weight)];
}

function sentence(tokens, row, token) {
  const order = row.map((weight, place) => [weight, place]).sort(([one], [other]) => other - one);
  const named = order.slice(0, 3).map(([weight, place]) => `${tokens[place]} ${percent(weight)}`);
  return `“${tokens[token]}” reads ${named.join(", ")}`;
}
