// Probabilities as bars.

import { make, percent, quoted, withNumber } from "./elements.js";

/** A list of bars for [name, share] pairs; with `pick`, each can be pressed. */
export function bars(entries, pick) {
  return make("ol", { class: "bars" }, ...entries.map((entry) => make("li", {}, bar(entry, pick))));
}

function bar([name, share], pick) {
  const parts = [
    make("span", { class: "bar-name" }, quoted(name)),
    make("span", { class: "bar-share" }, percent(share)),
    withNumber(make("span", { class: "bar-track", "aria-hidden": "true" }), "--share", share),
  ];
  if (!pick) return make("div", { class: "bar" }, ...parts);
  return make("button", { type: "button", class: "bar", click: () => pick(name) }, ...parts);
}

/** The names and shares as one sentence, for a screen reader. */
export function spoken(entries, most = 3) {
  return entries
    .slice(0, most)
    .map(([name, share]) => `${name} ${percent(share)}`)
    .join(", ");
}
