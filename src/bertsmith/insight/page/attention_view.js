// All heads over one text, however long: choose a head and a token, and read what it reads.

import { attentionLines } from "./attention_lines.js";
import { headGrid, kindsLegend } from "./attention_grid.js";
import { choice, heated, make, percent, quoted, walkable } from "./elements.js";

const MOST_LINES = 64; // tokens; beyond, columns of tokens with lines are too long to be read

/** Fill the page; `data` holds each head's map compressed, which is opened when the head is chosen. */
export function show(root, data) {
  const { tokens, layers, heads } = data;
  const chosen = { layer: data.layer, head: data.head, token: Math.min(data.token, tokens.length - 1), way: "reads" };
  const text = runningText(tokens, (token) => turnTo({ token }));
  const lines = tokens.length <= MOST_LINES ? attentionLines(tokens, (token) => text.mark((chosen.token = token))) : null;
  const grid = headGrid({ maps: data.thumbnails, kinds: data.kinds }, (layer, head) => turnTo({ layer, head }));
  const layer = choice("Layer", numbered(layers), { change: () => turnTo({ layer: Number(layer.box.value) }) });
  const head = choice("Head", numbered(heads), { change: () => turnTo({ head: Number(head.box.value) }) });
  const ways = [["reads", "what the token reads"], ["read", "what reads the token"]];
  const way = choice("Shade", ways, { change: () => turnTo({ way: way.box.value }) });
  const spoken = make("p", { class: "lead", role: "status" });
  let turn = 0;

  async function turnTo(wanted) {
    Object.assign(chosen, wanted);
    const mine = (turn += 1);
    const map = await opened(data.maps[chosen.layer][chosen.head], tokens.length);
    if (mine !== turn) return; // another head was chosen meanwhile
    layer.box.value = String(chosen.layer);
    head.box.value = String(chosen.head);
    grid.mark(chosen.layer, chosen.head);
    const row = chosen.way === "reads" ? map[chosen.token] : map.map((each) => each[chosen.token]);
    text.shade(row, chosen.token);
    spoken.textContent = sentence(tokens, row, chosen);
    if (lines) lines.show(map, chosen.token);
    root.dataset.ready = "true";
  }
  const controls = make("div", { class: "row" }, layer.root, head.root, way.root);
  const close = make("section", { class: "card" }, controls, spoken, text.root);
  if (lines) {
    lines.root.firstChild.hidden = true; // what it says stands above already
    close.append(lines.root);
  }
  const overview = make("section", { class: "card" }, make("h2", { class: "section" }, "All heads"), grid.root);
  overview.append(kindsLegend(data.kinds));
  root.append(make("div", { class: "split attention" }, close, overview));
  turnTo({});
}

const numbered = (count) => Array.from({ length: count }, (_, number) => [String(number), String(number + 1)]);

/** The tokens as one running text of buttons. */
function runningText(tokens, pick) {
  const buttons = tokens.map((text, token) =>
    make("button", { type: "button", class: "view-token", click: () => pick(token), focus: () => pick(token) }, quoted(text)),
  );
  const reach = walkable(buttons);
  const mark = (token) => {
    reach(token);
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", String(place === token)));
  };
  function shade(row, token) {
    mark(token);
    row.forEach((weight, place) => heated(buttons[place], Math.sqrt(weight)));
  }
  return { root: make("div", { class: "running", role: "group", "aria-label": "Choose a token" }, ...buttons), mark, shade };
}

function sentence(tokens, row, { token, way }) {
  const order = row.map((weight, place) => [weight, place]).sort(([one], [other]) => other - one);
  const named = order.slice(0, 3).map(([weight, place]) => `${tokens[place]} ${percent(weight)}`);
  return `“${tokens[token]}” ${way === "reads" ? "reads" : "is read by"} ${named.join(", ")}`;
}

const kept = new Map();

/** The map of one head as rows of weights: bytes hold their square roots, compressed. */
async function opened(packed, size) {
  if (kept.has(packed)) return kept.get(packed);
  const stream = new Blob([Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0))]).stream();
  const bytes = new Uint8Array(await new Response(stream.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
  const map = Array.from({ length: size }, (_, row) =>
    Array.from(bytes.subarray(row * size, (row + 1) * size), (byte) => (byte / 255) ** 2),
  );
  kept.set(packed, map);
  return map;
}
