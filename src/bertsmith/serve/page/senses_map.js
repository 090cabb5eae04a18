// The vectors of a word in several sentences as dots in a plane, and the sentences.

import { pieces } from "./codepoints.js";
import { draw, make, withNumber } from "./elements.js";

const MARGIN = 34; // pixels that keep the numbers inside the frame
const NEAREST = 24; // pixels between two dots that can both be read
const ROUNDS = 8; // of pushing dots apart
const SAME = 1e-3; // a distance that only rounding makes

/**
 * The map and the list of sentences beside it. `turnTo(layer)` shows the word after that layer; all layers have one
 * scale, so that the dots of layer 0 lie in one place. With `centred`, cosines are those without the mean.
 */
export function sensesMap({ points, layers }, sentences, { centred = false } = {}) {
  const last = layers.at(-1).plane.map(([x]) => x);
  const span = extent(last);
  const tones = last.map((x) => (x - span.low) / (span.high - span.low || 1));
  const dots = points.map((_, number) => dot(number, tones[number], () => look(number)));
  const rows = points.map((point, number) => row(number, textOf(point, sentences), tones[number], () => look(number)));
  const threads = draw("g", { class: "threads" });
  const name = { role: "img", "aria-label": "Map of the word's vectors" };
  const caption = draw("text", { class: "caption", x: "50%", y: 24, "text-anchor": "middle" });
  const map = draw("svg", { class: "map-of-senses", ...name }, caption, threads, ...dots);
  const shown = { layer: layers.length - 1, dot: 0 };

  function look(chosen) {
    shown.dot = chosen;
    const layer = layers[shown.layer];
    const cosines = (centred ? layer.centred : layer.similarity)[chosen];
    rows.forEach((each, number) => each.setAttribute("aria-pressed", String(number === chosen)));
    dots.forEach((each, number) => each.classList.toggle("lit", number === chosen));
    rows.forEach((each, number) => (each.lastChild.textContent = cosines[number].toFixed(2)));
    threads.replaceChildren(...points.flatMap((_, number) => thread(dots, chosen, number, cosines)));
  }
  function place() {
    const { plane } = layers[shown.layer];
    arrange(map, dots, plane, layers.flatMap((layer) => layer.plane));
    // Without a word about it, dots in a row look like different vectors.
    caption.textContent = inOnePlace(plane) ? "All in one place, drawn side by side" : "";
    look(shown.dot);
  }
  const list = make("section", { class: "card senses" }, make("h3", {}, "Cosine to the chosen one"), ...rows);
  new ResizeObserver(place).observe(map);
  const root = make("div", { class: "split" }, make("div", { class: "card map-frame" }, map), list);
  return { root, picture: map, turnTo: (layer) => ((shown.layer = layer), place()) };
}

function dot(number, tone, choose) {
  const label = draw("text", { "text-anchor": "middle", dy: "0.35em" }, String(number + 1));
  const group = draw("g", { class: "dot", mouseenter: choose, click: choose }, draw("circle", { r: 13 }), label);
  return withNumber(group, "--tone", tone);
}

/** The sentence of a point, with the word in bold. */
function textOf({ sentence, ...span }, sentences) {
  return pieces(sentences[sentence], [span]).map((piece) => (piece.span ? make("b", {}, piece.text) : piece.text));
}

function row(number, text, tone, choose) {
  const chip = withNumber(make("span", { class: "number toned" }, String(number + 1)), "--tone", tone);
  const button = make("button", { type: "button", class: "sense", mouseenter: choose, focus: choose, click: choose });
  button.append(chip, make("span", { class: "sense-text", dir: "auto" }, ...text), make("span", { class: "bar-share" }));
  return button;
}

const extent = (values) => ({ low: Math.min(...values), high: Math.max(...values) });

const inOnePlace = (plane) => plane.every(([x, y]) => Math.hypot(x - plane[0][0], y - plane[0][1]) < SAME);

/** Put the dots into the frame. */
function arrange(map, dots, plane, everywhere) {
  const { width, height } = map.getBoundingClientRect();
  if (!width || !height) return;
  map.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const spots = apart(placed(plane, everywhere, width, height));
  spots.forEach(({ left, top }, number) => {
    dots[number].setAttribute("transform", `translate(${left.toFixed(1)} ${top.toFixed(1)})`);
    Object.assign(dots[number].dataset, { left, top });
  });
}

/** Where the points come to lie: one scale both ways and in all layers, so that distances are true. */
function placed(plane, everywhere, width, height) {
  const [across, up] = [0, 1].map((axis) => extent(everywhere.map((point) => point[axis])));
  const room = [width - 2 * MARGIN, height - 2 * MARGIN];
  const scale = Math.min(room[0] / (across.high - across.low || 1), room[1] / (up.high - up.low || 1));
  return plane.map(([x, y]) => ({
    left: width / 2 + scale * (x - (across.low + across.high) / 2),
    top: height / 2 - scale * (y - (up.low + up.high) / 2),
  }));
}

/** The same spots, those that would hide each other pushed just so far that both can be read. */
function apart(spots) {
  for (let round = 0; round < ROUNDS; round += 1) {
    for (const [number, one] of spots.entries()) {
      for (const other of spots.slice(number + 1)) push(one, other);
    }
  }
  return spots;
}

function push(one, other) {
  const [across, down] = [other.left - one.left || 0.1, other.top - one.top];
  const distance = Math.hypot(across, down);
  const lack = Math.max(0, NEAREST - distance) / (2 * distance);
  one.left -= lack * across;
  one.top -= lack * down;
  other.left += lack * across;
  other.top += lack * down;
}

function thread(dots, from, to, row) {
  if (from === to || dots[from].dataset.left === undefined) return [];
  const { low, high } = extent(row.filter((_, number) => number !== from));
  const [one, other] = [dots[from].dataset, dots[to].dataset];
  const line = draw("line", { x1: one.left, y1: one.top, x2: other.left, y2: other.top });
  return [withNumber(line, "--weight", (row[to] - low) / (high - low || 1))];
}
