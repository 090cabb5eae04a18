// The overview: each head as a small map, layers from top to bottom, with what kind of head it is.

import { make, walkable, withNumber } from "./elements.js";

export const KINDS = {
  previous: ["←", "reads the token before"],
  next: ["→", "reads the token after"],
  itself: ["●", "reads itself"],
  first: ["C", "reads the first token, [CLS]"],
  separator: ["S", "reads the separator, [SEP]"],
  broad: ["≋", "reads a little of everything"],
  mixed: ["", "reads here and there"],
};

/**
 * A grid of canvases; `mark(layer, head)` shows which one is chosen (no head: a whole row), `pick` hears of presses.
 * Where `kinds` are known, each has the sign of its kind.
 */
export function headGrid({ kinds, maps }, pick) {
  const [layers, heads] = [maps.length, maps[0].length];
  const places = Array.from({ length: layers * heads }, (_, place) => [Math.floor(place / heads), place % heads]);
  const buttons = places.map(([layer, head]) => mapButton(layer, head, kinds?.[layer][head].kind, pick));
  const root = gridOfHeads(buttons, { layers, heads });
  const reach = walkable(buttons, { columns: heads });
  function paint() {
    if (!root.isConnected) return document.removeEventListener("themechange", paint);
    const ink = inkOf(root);
    places.forEach(([layer, head], place) => paintMap(buttons[place].firstChild, maps[layer][head], ink));
  }
  function mark(layer, head) {
    places.forEach(([row, column], place) => {
      const chosen = row === layer && (head === null || column === head);
      buttons[place].setAttribute("aria-pressed", String(chosen));
    });
    reach(layer * heads + (head ?? 0));
  }
  document.addEventListener("themechange", paint);
  // Once it is on the page: only there it has colours.
  const arrival = new ResizeObserver(() => {
    if (!root.isConnected) return;
    arrival.disconnect();
    paint();
  });
  arrival.observe(root);
  return { root, mark };
}

/** One element for each head in rows of layers, with their numbers beside. */
export function gridOfHeads(elements, { layers, heads }) {
  const root = withNumber(make("div", { class: "heads", role: "group", "aria-label": "All heads" }), "--heads", heads);
  root.append(make("span", { class: "corner" }), ...numbers(heads, "head"));
  for (let layer = 0; layer < layers; layer += 1) {
    root.append(axis(layer, "layer"), ...elements.slice(layer * heads, (layer + 1) * heads));
  }
  return root;
}

/** The signs of the kinds that occur, and what they mean. */
export function kindsLegend(kinds) {
  const found = new Set(kinds.flat().map(({ kind }) => kind));
  const entries = Object.entries(KINDS).filter(([kind, [sign]]) => sign && found.has(kind));
  const line = ([, [sign, said]]) => make("li", {}, make("span", { class: "kind", "aria-hidden": "true" }, sign), said);
  return make("ul", { class: "kinds" }, ...entries.map(line));
}

function mapButton(layer, head, kind, pick) {
  const [sign, said] = KINDS[kind] ?? ["", ""];
  const title = `Layer ${layer + 1}, head ${head + 1}`;
  const look = { type: "button", class: "map", title: said ? `${title}: ${said}` : title, "aria-label": title };
  const mark = sign ? make("span", { class: "kind", "aria-hidden": "true" }, sign) : null;
  return make("button", { ...look, click: () => pick(layer, head) }, make("canvas", { "aria-hidden": "true" }), mark);
}

const numbers = (count, name) => Array.from({ length: count }, (_, number) => axis(number, name));

/** The first of its row or column has its name with it. */
function axis(number, name) {
  const text = number === 0 ? `${name} 1` : String(number + 1);
  return make("span", { class: `axis axis-${name}`, "aria-hidden": "true" }, text);
}

/** The element's text colour as red, green and blue, whatever way the style sheet writes it. */
function inkOf(element) {
  const brush = make("canvas").getContext("2d");
  brush.fillStyle = getComputedStyle(element).color;
  brush.fillRect(0, 0, 1, 1);
  return brush.getImageData(0, 0, 1, 1).data;
}

function paintMap(canvas, map, [red, green, blue]) {
  const size = map.length;
  const image = new ImageData(size, size);
  map.forEach((row, y) =>
    row.forEach((weight, x) => {
      // The square root lifts small weights, which are most of them, out of the dark.
      image.data.set([red, green, blue, 255 * Math.sqrt(weight)], 4 * (y * size + x));
    }),
  );
  canvas.width = canvas.height = size;
  canvas.getContext("2d").putImageData(image, 0, 0);
}
