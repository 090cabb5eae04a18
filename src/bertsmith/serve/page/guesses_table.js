// Guesses layer by layer: what would stand in a blank if the model ended there.

import { make, percent, quoted, withNumber } from "./elements.js";

/** The table for one mask, the last layer on top; the bars follow what the last layer finds best. */
export function guessesTable({ layers }, number) {
  const best = layers.at(-1).guesses[0].token;
  const rows = layers.map((layer, place) => row(layer, place, place === layers.length - 1)).reverse();
  const heads = ["After layer", "Best guesses there", "Chance of “", quoted(best), "”"];
  const [first, second, ...third] = heads;
  const head = make("tr", {}, ...[[first], [second], third].map((each) => make("th", { scope: "col" }, ...each)));
  const table = make("table", { class: "by-layer" }, make("thead", {}, head), make("tbody", {}, ...rows));
  const title = make("h3", {}, make("span", { class: "number" }, String(number + 1)), "Layer by layer: ", appears(layers, best));
  const frame = make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Guesses layer by layer" }, table);
  return make("section", { class: "card" }, title, frame);
}

/** From which layer on the last layer's best guess is the best. */
function appears(layers, best) {
  const first = layers.findLastIndex(({ guesses }) => guesses[0].token !== best) + 1;
  return make("span", {}, "“", quoted(best), `” leads from layer ${first} on`);
}

function row({ guesses, final }, place, isLast) {
  const name = place === 0 ? "0, nothing read yet" : isLast ? `${place}, the last` : String(place);
  const words = guesses.flatMap(({ token, probability }) => [
    make("span", { class: "guess" }, quoted(token), make("span", { class: "bar-share" }, percent(probability))),
  ]);
  const track = withNumber(make("span", { class: "bar-track", "aria-hidden": "true" }), "--share", final);
  const share = make("span", { class: "bar-share" }, percent(final));
  const cells = [make("td", {}, ...words), make("td", { class: "traced" }, track, share)];
  return make("tr", {}, make("th", { scope: "row" }, name), ...cells);
}
