// One head: the tokens twice, side by side, with lines from each to what it reads.

import { draw, heated, make, percent, quoted, walkable, withNumber } from "./elements.js";

const ROW = 28; // pixels, as in the style sheet
const WIDTH = 100;
const FAINTEST = 0.02; // lines below this weight only cloud the picture
const MOST_LINES = 1500; // of tokens that are not chosen: more take long to draw, and cannot be told apart

/**
 * The picture of one head: `show(weights, token)` fills it; `pick(token)` hears which token was chosen, with whether it
 * was pressed. `hide(tokens)` leaves some out.
 */
export function attentionLines(tokens, pick) {
  let weights = [];
  let hidden = new Set();
  const from = tokens.map((text, place) => fromToken(text, (pressed) => look(place, pressed)));
  const to = tokens.map((text) => make("li", { class: "to" }, make("span", { class: "to-share" }), quoted(text)));
  const lines = draw("svg", { class: "lines", preserveAspectRatio: "none", "aria-hidden": "true" });
  const [faint, lit] = [draw("g"), draw("g")];
  lines.append(faint, lit);
  const spoken = make("p", { class: "lead", role: "status" });
  const reach = walkable(from);
  let rows = [];

  function look(token, pressed = false) {
    pick(token, pressed);
    reach(token);
    from.forEach((button, place) => button.setAttribute("aria-pressed", String(place === token)));
    to.forEach((item, place) => light(item, weights[token][place]));
    lit.replaceChildren(...fan(token, FAINTEST).map(({ element }) => (element.classList.add("lit"), element)));
    spoken.textContent = sentence(tokens, weights[token], token, hidden);
  }
  /** The lines from a token, to those that are shown. */
  function fan(source, faintest) {
    const shown = weights[source].flatMap((weight, target) => (weight < faintest || hidden.has(target) ? [] : [[weight, target]]));
    return shown.map(([weight, target]) => ({ weight, element: line(rows[source], rows[target], weight) }));
  }
  function show(of, token) {
    weights = of;
    const shown = tokens.flatMap((_, place) => (hidden.has(place) ? [] : [place]));
    rows = tokens.map((_, place) => shown.indexOf(place));
    lines.setAttribute("viewBox", `0 0 ${WIDTH} ${shown.length * ROW}`);
    const all = shown.flatMap((source) => fan(source, FAINTEST)).sort((one, other) => other.weight - one.weight);
    faint.replaceChildren(...all.slice(0, MOST_LINES).map(({ element }) => element));
    look(hidden.has(token) ? shown[0] : token);
  }
  function hide(places) {
    hidden = new Set(places);
    [from, to].forEach((list) => list.forEach((each, place) => (each.hidden = hidden.has(place))));
  }
  const columns = [
    make("div", { class: "from-list", role: "group", "aria-label": "Choose a token" }, ...from),
    lines,
    make("ol", { class: "to-list", "aria-label": "What it reads" }, ...to),
  ];
  return { root: make("div", {}, spoken, make("div", { class: "weave" }, ...columns)), show, hide };
}

function fromToken(text, choose) {
  const [glance, press] = [() => choose(false), () => choose(true)];
  return make("button", { type: "button", class: "from", mouseenter: glance, focus: glance, click: press }, quoted(text));
}

function light(item, weight) {
  heated(item, Math.sqrt(weight)); // as in the small maps: most weights are small
  item.firstChild.textContent = weight < 0.01 ? "" : percent(weight);
}

function line(source, target, weight) {
  const [y1, y2] = [source, target].map((row) => (row + 0.5) * ROW);
  const drawn = draw("line", { x1: 0, x2: WIDTH, y1, y2, "vector-effect": "non-scaling-stroke" });
  return withNumber(drawn, "--weight", weight);
}

function sentence(tokens, row, token, hidden) {
  const order = row.map((weight, place) => [weight, place]).filter(([, place]) => !hidden.has(place));
  order.sort(([one], [other]) => other - one);
  const named = order.slice(0, 3).map(([weight, place]) => `${tokens[place]} ${percent(weight)}`);
  return `“${tokens[token]}” reads ${named.join(", ")}`;
}
