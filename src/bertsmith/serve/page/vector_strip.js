// A vector as a strip of cells: one colour for what lies above 0, another for what lies below.

import { draw, withNumber } from "./elements.js";

const [CELL, HIGH] = [4, 18]; // the strip is stretched to the width it is given

/** The strip of these values; `largest` is the size that gets the full colour. */
export function vectorStrip(values, largest = largestOf(values), label = "") {
  const cells = values.map((value, place) => {
    const rect = draw("rect", { x: place * CELL, y: 0, width: CELL, height: HIGH, class: value < 0 ? "below" : "above" });
    // The square root lifts the many small numbers beside a few large ones.
    return withNumber(rect, "--weight", Math.sqrt(Math.min(1, Math.abs(value) / (largest || 1))).toFixed(3));
  });
  const first = values.slice(0, 4).map((value) => value.toFixed(2)).join(", ");
  const name = `${label} ${values.length} numbers: ${first} …`.trim();
  const look = { class: "strip", viewBox: `0 0 ${values.length * CELL} ${HIGH}`, preserveAspectRatio: "none" };
  return draw("svg", { ...look, role: "img", "aria-label": name }, draw("title", {}, name), ...cells);
}

/** The size of the largest of these values. */
export function largestOf(values) {
  return Math.max(...values.map(Math.abs));
}
