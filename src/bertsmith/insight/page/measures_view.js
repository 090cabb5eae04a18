// Measures of every head: choose one of them and a head, and read all that is known of that head.

import { choice, make, withNumber } from "./elements.js";
import { headCells, headName, shown, strongest } from "./head_cells.js";
import { reportTables } from "./report_tables.js";

/** Fill the page; each measure has its values [layers][heads], its scale and the largest value of untrained networks. */
export function show(root, data) {
  const { measures } = data;
  const [layers, heads] = [measures[0].values.length, measures[0].values[0].length];
  const named = measures.map(({ name }, number) => [String(number), name]);
  const measure = choice("Measure", named, { change: turn });
  const chosen = { layer: 0, head: 0 };
  const grid = headCells({ layers, heads }, (layer, head) => look(layer, head));
  const spoken = make("p", { class: "lead", role: "status" });
  const scale = make("p", { class: "note" });
  const name = make("h2", { class: "section" });
  const list = make("ul", { class: "bars" });

  function look(layer, head) {
    Object.assign(chosen, { layer, head });
    grid.mark(layer, head);
    name.textContent = `Head ${headName(layer, head)}`;
    list.replaceChildren(...measures.map((each) => measured(each, layer, head)));
    const now = measures[Number(measure.box.value)];
    spoken.textContent = `Head ${headName(layer, head)}: ${now.name} ${shown(now.values[layer][head], now.scale)}`;
  }
  function turn() {
    const { values, scale: of, untrained } = measures[Number(measure.box.value)];
    grid.show(values, of);
    scale.textContent =
      `From 0 (faint) to ${shown(of.top, of)} (full), the largest here. ` +
      `Largest in networks with random weights: ${shown(untrained, of)}.`;
    look(...strongest(values));
    root.dataset.ready = "true";
  }
  const shades = make("section", { class: "card" }, make("div", { class: "row" }, measure.root), spoken, grid.root, scale);
  const of = "Each bar ends at the right where no head has more; the thin line is the largest value of random weights.";
  const one = make("section", { class: "card" }, name, list, make("p", { class: "note" }, of));
  root.append(make("p", { class: "lead" }, data.lead), make("div", { class: "split" }, shades, one));
  root.append(...reportTables(data.tables));
  turn();
}

/** One measure of a head, as a bar beside the head that has the most. */
function measured({ name, values, scale, untrained }, layer, head) {
  const value = values[layer][head];
  const track = withNumber(make("span", { class: "bar-track", "aria-hidden": "true" }), "--share", value / scale.top);
  const line = withNumber(make("span", { class: "bar-line", "aria-hidden": "true" }), "--share", Math.min(1, untrained / scale.top));
  const parts = [make("span", { class: "bar-name" }, name), make("span", { class: "bar-share" }, shown(value, scale)), track, line];
  return make("li", { class: "bar" }, ...parts);
}
