// Numbers of all heads as a grid of shades: layers from top to bottom, one head beside the other.

import { gridOfHeads } from "./attention_grid.js";
import { heated, make, walkable } from "./elements.js";

/**
 * A grid that can be pressed and walked by keyboard; `show(values, scale)` fills it, `mark(layer, head)` tells which
 * head is chosen, `pick` hears of it.
 */
export function headCells({ layers, heads }, pick) {
  const places = Array.from({ length: layers * heads }, (_, place) => [Math.floor(place / heads), place % heads]);
  const cells = places.map(([layer, head]) => {
    const choose = () => pick(layer, head);
    return make("button", { type: "button", class: "head-cell", click: choose, focus: choose });
  });
  const reach = walkable(cells, { columns: heads });
  function show(values, scale) {
    places.forEach(([layer, head], place) => {
      const value = values[layer][head];
      cells[place].textContent = brief(scale.factor * value);
      cells[place].title = `Layer ${layer + 1}, head ${head + 1}: ${shown(value, scale)}`;
      cells[place].setAttribute("aria-label", cells[place].title);
      heated(cells[place], Math.min(1, Math.max(0, value / scale.top)));
    });
  }
  function mark(layer, head) {
    reach(layer * heads + head);
    cells.forEach((cell, place) => cell.setAttribute("aria-pressed", String(place === layer * heads + head)));
  }
  return { root: gridOfHeads(cells, { layers, heads }), show, mark };
}

/** A number with its unit. */
export function shown(value, { factor, unit }) {
  const scaled = factor * value;
  return `${scaled.toFixed(Math.abs(scaled) < 10 ? 2 : 1)} ${unit}`;
}

/** A number that fits into a cell. */
export function brief(scaled) {
  return scaled.toFixed(Math.abs(scaled) < 9.95 ? 1 : 0);
}

/** A head as the tables have it, both numbers counted from 1. */
export function headName(layer, head) {
  return `${layer + 1}-${head + 1}`;
}

/** Layer and head of the largest value; of equals the first. */
export function strongest(values) {
  const all = values.flatMap((row, layer) => row.map((value, head) => [value, layer, head]));
  return all.reduce((most, each) => (each[0] > most[0] ? each : most)).slice(1);
}
