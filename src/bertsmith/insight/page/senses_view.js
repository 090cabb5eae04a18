// A word in several sentences, after each layer: from one point to one for each sense.

import { make } from "./elements.js";
import { sensesMap } from "./senses_map.js";

/** Fill the page; `data.layers` holds points and cosines after the embeddings and after each layer. */
export function show(root, data) {
  const stage = make("div", {});
  const last = data.layers.length - 1;
  const slider = make("input", { type: "range", min: 0, max: last, step: 1, id: "layer", input: turn });
  const shown = make("output", { for: "layer" });

  function turn() {
    const number = Number(slider.value);
    shown.textContent = data.layers[number].name;
    const map = sensesMap({ ...data.layers[number], layers: data.layers }, data.sentences);
    stage.replaceChildren(map.root);
    if (map.turnTo) map.turnTo(number);
    else map.place();
    root.dataset.ready = "true";
  }
  slider.value = String(last);
  const label = make("label", { for: "layer", class: "label" }, "Layer");
  const row = make("div", { class: "row" }, label, slider, shown);
  row.hidden = last === 0;
  root.append(make("p", { class: "lead" }, data.lead), row, stage);
  turn();
}
