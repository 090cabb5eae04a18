// Relations and heads: which layer knows a relation, and which head of it.

import { bars } from "./bars.js";
import { choice, heated, make, percent, walkable, withNumber } from "./elements.js";
import { brief, headCells, headName, strongest } from "./head_cells.js";
import { reportTables } from "./report_tables.js";

const PERCENT = { factor: 100, unit: "per cent", top: 1 };

/** Fill the page; `data.accuracy` is how often each head is right [relations][directions][layers][heads]. */
export function show(root, data) {
  const { relations, accuracy, directions } = data;
  const [layers, heads] = [accuracy[0][0].length, accuracy[0][0][0].length];
  const ways = directions.map((name, number) => [String(number), name]);
  const way = choice("Direction", ways, { change: () => turn() });
  const title = make("h2", { class: "section" });
  const spoken = make("p", { class: "lead", role: "status" });
  const compared = make("div");
  const grid = headCells({ layers, heads }, (layer, head) => tell(layer, head));
  const map = relationMap(data, layers, (relation) => choose(relation));
  let relation = 0;

  function tell(layer, head) {
    grid.mark(layer, head);
    const right = percent(accuracy[relation][Number(way.box.value)][layer][head]);
    spoken.textContent = `Head ${headName(layer, head)} is right about ${right} of “${relations[relation].name}”`;
  }
  function turn() {
    const values = accuracy[relation][Number(way.box.value)];
    grid.show(values, PERCENT);
    tell(...strongest(values));
  }
  function choose(number) {
    relation = number;
    const { name, count, layer, head, direction } = relations[number];
    title.textContent = `${name}, ${count.toLocaleString("en")} times`;
    compared.replaceChildren(comparison(relations[number]));
    way.box.value = String(direction);
    grid.show(accuracy[number][direction], PERCENT);
    tell(layer, head);
    root.dataset.ready = "true";
  }
  const overview = make("section", { class: "card" }, make("h2", { class: "section" }, "Best head of each layer"), map.root);
  overview.append(make("p", { class: "note" }, "Per cent of words whose head is found, from faint (0) to full (100). Choose a relation."));
  const close = make("section", { class: "card" }, title, compared, make("div", { class: "row" }, way.root), spoken, grid.root);
  root.append(make("p", { class: "lead" }, data.lead), make("div", { class: "split" }, overview, close));
  root.append(...reportTables(data.tables));
  map.mark(0);
  choose(0);
}

/** What the chosen head is right about, beside what needs no head and no training. */
function comparison({ layer, head, right, low, high, offset, baseline, untrained, beats }) {
  const ends = [low, high].map(percent).join(" to ");
  const entries = [
    [`head ${headName(layer, head)} (95 %: ${ends})`, right],
    [`the word at ${offset > 0 ? "+" : ""}${offset}`, baseline],
    ["best of untrained networks", untrained],
  ];
  const verdict = beats ? "The head beats the fixed offset." : "The head does not beat the fixed offset.";
  return make("div", {}, bars(entries), make("p", { class: "note" }, verdict));
}

/** The table of relations and layers; every row is a button, and the arrow keys walk among them. */
function relationMap({ relations, accuracy }, layers, pick) {
  const buttons = relations.map(({ name }, number) =>
    make("button", { type: "button", class: "relation", click: () => chosen(number), focus: () => chosen(number) }, name),
  );
  const reach = walkable(buttons);
  function mark(number) {
    reach(number);
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", String(place === number)));
  }
  function chosen(number) {
    mark(number);
    pick(number);
  }
  const numbers = Array.from({ length: layers }, (_, layer) => make("th", { scope: "col" }, String(layer + 1)));
  const rows = relations.map((_, number) => {
    const shades = Array.from({ length: layers }, (__, layer) => {
      const most = Math.max(...accuracy[number].flatMap((values) => values[layer]));
      return heated(make("td", { click: () => chosen(number) }, brief(100 * most)), most);
    });
    return make("tr", {}, make("th", { scope: "row" }, buttons[number]), ...shades);
  });
  const head = make("thead", {}, make("tr", {}, make("td", { class: "corner" }, "layer"), ...numbers));
  const table = make("table", { class: "relations" }, head, make("tbody", {}, ...rows));
  return { root: make("div", { class: "wide" }, withNumber(table, "--layers", layers)), mark };
}
