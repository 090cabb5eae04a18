// Cosines of texts, each with each, as a table of shades.

import { brief } from "./codepoints.js";
import { heated, make, quoted } from "./elements.js";

const SCALE = [0, 0.5, 0.7, 0.8, 0.9, 1]; // the cosines that the legend names
const PALEST = 0.06;

/**
 * How warm a cosine is. The scale is the same for all texts and models; the cube spreads the upper end, where the
 * cosines of one encoder crowd.
 */
export function warmth(cosine) {
  return PALEST + (1 - PALEST) * Math.min(1, Math.max(0, cosine)) ** 3;
}

/** The table of these cosines, with the texts next to its rows. */
export function heatTable(similarity, texts) {
  const columns = texts.map((text, i) => make("th", { scope: "col", title: text }, String(i + 1)));
  const head = make("thead", {}, make("tr", {}, make("td"), ...columns));
  const cells = (row, i) => row.map((value, j) => cell(value, i, j, texts));
  const rows = similarity.map((row, i) => make("tr", {}, rowName(texts[i], i), ...cells(row, i)));
  return make("table", { class: "heat" }, head, make("tbody", {}, ...rows));
}

/** What the shades say. */
export function heatLegend() {
  const steps = SCALE.map((cosine) => heated(make("li", {}, String(cosine)), warmth(cosine)));
  const [apart, alike] = ["far apart", "the same direction"].map((end) => make("span", {}, end));
  return make("div", { class: "scale" }, apart, make("ol", { "aria-label": "Shades of the cosines" }, ...steps), alike);
}

/** Which two are closest, in a sentence. */
export function closestPair(similarity, texts) {
  const pairs = texts.flatMap((_, i) => texts.slice(i + 1).map((__, k) => [similarity[i][i + 1 + k], i, i + 1 + k]));
  const [value, i, j] = pairs.reduce((best, pair) => (pair[0] > best[0] ? pair : best));
  const [one, other] = [texts[i], texts[j]].map((text) => quoted(brief(text)));
  return make("p", { class: "lead nearest" }, "Closest: “", one, "” and “", other, `”, ${value.toFixed(2)}.`);
}

function rowName(text, place) {
  const number = make("span", { class: "number" }, String(place + 1));
  const name = make("span", { class: "numbered" }, number, make("span", { dir: "auto" }, text));
  return make("th", { scope: "row", title: text }, name);
}

function cell(value, i, j, texts) {
  const title = `${texts[i]} – ${texts[j]}`;
  // A text with itself says nothing: grey, so that it does not outshine the others.
  if (i === j) return make("td", { title, class: "itself" }, value.toFixed(2));
  return heated(make("td", { title }, value.toFixed(2)), warmth(value));
}
