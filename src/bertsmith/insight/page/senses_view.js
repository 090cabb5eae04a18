// A word in several sentences, after each layer: from one point to one for each sense.

import { make } from "./elements.js";
import { sensesMap } from "./senses_map.js";

/** Fill the page; `data.layers` holds places and cosines from the word's own vector to the last layer. */
export function show(root, data) {
  const last = data.layers.length - 1;
  const map = sensesMap(data, data.sentences);
  const slider = make("input", { type: "range", min: 0, max: last, step: 1, id: "layer", input: turn });
  const shown = make("output", { for: "layer" });

  function turn() {
    const number = Number(slider.value);
    shown.textContent = data.layers[number].name;
    map.turnTo(number);
    root.dataset.ready = "true";
  }
  slider.value = String(last);
  const label = make("label", { for: "layer", class: "label" }, "Layer");
  const heading = make("h2", { class: "section" }, "Layer by layer");
  const row = make("div", { class: "row" }, label, slider, shown);
  root.append(make("p", { class: "lead" }, data.lead), heading, row, map.root);
  turn();
}
