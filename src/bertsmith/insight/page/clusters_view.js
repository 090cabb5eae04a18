// Heads as points: those that attend alike lie near each other.

import { choice, draw, make, walkable, withNumber } from "./elements.js";
import { headName } from "./head_cells.js";
import { reportTables } from "./report_tables.js";

const [WIDTH, HEIGHT, MARGIN] = [640, 520, 26]; // of the map, in its own units
const NEIGHBOURS = 8;

/** Fill the page; `data.points` and `data.kinds` are in the order of the layers, `data.distances` between all of them. */
export function show(root, data) {
  const { points, kinds, heads, distances } = data;
  const layers = points.length / heads;
  const names = points.map((_, number) => headName(Math.floor(number / heads), number % heads));
  const tones = points.map((_, number) => (layers > 1 ? Math.floor(number / heads) / (layers - 1) : 0));
  const found = [...new Set(kinds)];
  const dots = placed(points).map(([x, y], number) => dot({ x, y, name: names[number], kind: kinds[number] }, () => look(number)));
  dots.forEach((each, number) => withNumber(each, "--tone", tones[number]));
  const reach = walkable(dots, { columns: heads });
  const map = draw("svg", { class: "head-map", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": "Map of the heads" }, ...dots);
  const colours = choice("Colour", [["kind", "what a head does"], ["layer", "its layer"]], { change: turn });
  const legend = make("ul", { class: "legend" });
  const title = make("h2", { class: "section" });
  const spoken = make("p", { class: "lead", role: "status" });
  const list = make("ol", { class: "near" });

  function look(chosen) {
    reach(chosen);
    const order = names.map((_, number) => number).filter((number) => number !== chosen);
    order.sort((one, other) => distances[chosen][one] - distances[chosen][other]);
    const near = order.slice(0, NEIGHBOURS);
    dots.forEach((each, number) => {
      each.setAttribute("aria-pressed", String(number === chosen));
      each.classList.toggle("near-one", near.includes(number));
    });
    title.textContent = `Head ${names[chosen]}, ${kinds[chosen]}`;
    spoken.textContent = `Most alike: ${near.slice(0, 3).map((number) => names[number]).join(", ")}`;
    list.replaceChildren(...near.map((number) => neighbour(number, chosen)));
  }
  function neighbour(number, chosen) {
    const parts = [`${names[number]}, ${kinds[number]}`, make("span", { class: "bar-share" }, distances[chosen][number].toFixed(3))];
    // The list is made anew: who pressed the button goes on from the dot.
    const go = () => (look(number), dots[number].focus());
    return make("li", {}, make("button", { type: "button", class: "bar", click: go }, ...parts));
  }
  function turn() {
    const byLayer = colours.box.value === "layer";
    map.classList.toggle("by-layer-tone", byLayer);
    legend.replaceChildren(...(byLayer ? layerLegend(layers) : kindLegend(found, kinds)));
    root.dataset.ready = "true";
  }
  const one = make("section", { class: "card" }, title, spoken, list, make("p", { class: "note" }, "Divergence in nats; 0: they attend to the same."));
  const frame = make("section", { class: "card" }, make("div", { class: "row" }, colours.root), map, legend);
  root.append(make("p", { class: "lead" }, data.lead), make("div", { class: "split" }, frame, one));
  root.append(...reportTables(data.tables));
  turn();
  look(closest(distances));
}

/** One of the two heads that are most alike. */
function closest(distances) {
  const nearest = distances.map((row, number) => Math.min(...row.filter((_, other) => other !== number)));
  return nearest.indexOf(Math.min(...nearest));
}

/** A point with its name beside it. */
function dot({ x, y, name, kind }, choose) {
  const label = draw("text", { x: 9, dy: "0.35em" }, name);
  const look = { class: `head-dot kind-${kind}`, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` };
  const told = { role: "button", "aria-label": `Head ${name}, ${kind}` };
  return draw("g", { ...look, ...told, click: choose, focus: choose }, draw("circle", { r: 6 }), label);
}

/** Where the points come to lie: one scale both ways, so that distances are true. */
function placed(points) {
  const ends = [0, 1].map((axis) => points.map((point) => point[axis])).map((values) => [Math.min(...values), Math.max(...values)]);
  const [across, up] = ends.map(([low, high]) => high - low || 1);
  // Names stand at the right of their points.
  const scale = Math.min((WIDTH - 3.4 * MARGIN) / across, (HEIGHT - 2 * MARGIN) / up);
  const middle = ends.map(([low, high]) => (low + high) / 2);
  return points.map(([x, y]) => [WIDTH / 2 - MARGIN / 2 + scale * (x - middle[0]), HEIGHT / 2 - scale * (y - middle[1])]);
}

function kindLegend(found, kinds) {
  const counted = (kind) => `${kind} (${kinds.filter((each) => each === kind).length})`;
  return found.map((kind) => make("li", { class: `kind-${kind}` }, counted(kind)));
}

function layerLegend(layers) {
  const numbers = layers > 1 ? [...new Set([0, Math.floor((layers - 1) / 2), layers - 1])] : [0];
  return numbers.map((layer) => withNumber(make("li", { class: "layer-tone" }, `layer ${layer + 1}`), "--tone", layers > 1 ? layer / (layers - 1) : 0));
}
