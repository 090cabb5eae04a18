// Controls that several panels use: a slider over layers, a box to tick, buttons that save a picture.

import { make } from "./elements.js";
import { savePng, saveSvg } from "./pictures.js";

/**
 * A slider over the layers, 0 to `last`; `change(layer)` hears of moves. `fit(last)` sets how many there are, and
 * `name(layer)` gives its label.
 */
export function layerSlider(change, { first = "the word alone" } = {}) {
  const box = make("input", { type: "range", min: 0, max: 0, step: 1, value: 0 });
  const said = make("output", {});
  const nameOf = (layer) => (layer === 0 ? `0, ${first}` : layer === Number(box.max) ? `${layer}, the last` : String(layer));
  const name = () => (said.textContent = nameOf(Number(box.value)));
  box.addEventListener("input", (event) => {
    event.stopPropagation(); // the layers are all here: nothing is to be asked
    name();
    change(Number(box.value));
  });
  function fit(last, wanted) {
    box.max = String(last);
    box.value = String(Math.min(last, wanted ?? last));
    name();
    return Number(box.value);
  }
  const root = make("label", { class: "field inline slider" }, make("span", { class: "label" }, "Layer"), box, said);
  return { root, box, fit };
}

/** A labelled box to tick. */
export function tick(label, attributes = {}) {
  const box = make("input", { type: "checkbox", ...attributes });
  return { box, root: make("label", { class: "tick" }, box, make("span", {}, label)) };
}

/** Buttons that save the picture which `picture()` draws, as SVG and as PNG. */
export function saveButtons(picture, name) {
  const button = (kind, save) => {
    const title = `Save the picture as ${kind}`;
    const look = { type: "button", class: "quiet", title, "aria-label": title, click: () => save(picture(), name) };
    return make("button", look, kind);
  };
  return make("div", { class: "save" }, button("SVG", saveSvg), button("PNG", savePng));
}
