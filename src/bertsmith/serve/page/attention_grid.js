// The overview: each head as a small map, layers from top to bottom.

import { make, walkable, withNumber } from "./elements.js";

/** A grid of canvases; `mark(layer, head)` shows which one is chosen, `pick` hears of presses. */
export function headGrid({ layers, heads, weights }, pick) {
  const root = withNumber(make("div", { class: "heads", role: "group", "aria-label": "All heads" }), "--heads", heads);
  const places = Array.from({ length: layers * heads }, (_, place) => [Math.floor(place / heads), place % heads]);
  const buttons = places.map(([layer, head]) => {
    const title = `Layer ${layer + 1}, head ${head + 1}`;
    const look = { type: "button", class: "map", title, "aria-label": title };
    return make("button", { ...look, click: () => pick(layer, head) }, make("canvas", { "aria-hidden": "true" }));
  });
  root.append(...buttons);
  const reach = walkable(buttons, { columns: heads });
  function paint() {
    if (!root.isConnected) return document.removeEventListener("themechange", paint);
    const ink = inkOf(root);
    places.forEach(([layer, head], place) => paintMap(buttons[place].firstChild, weights[layer][head], ink));
  }
  function mark(layer, head) {
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", String(place === layer * heads + head)));
    reach(layer * heads + head);
  }
  document.addEventListener("themechange", paint);
  requestAnimationFrame(paint);
  return { root, mark };
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
