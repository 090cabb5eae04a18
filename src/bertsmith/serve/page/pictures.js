// Pictures to keep: SVG that stands for itself, with the colours that the page has now, and PNG of it.

import { draw } from "./elements.js";
import { warmth } from "./heat_table.js";

const STYLES = ["fill", "stroke", "stroke-width", "opacity", "font-family", "font-size", "font-weight"];
const SCALE = 2; // pixels of a PNG for each of the page
const [ROW, LETTER, MARGIN] = [26, 8.5, 16]; // pixels
const FAINTEST = 0.02;

/** One head as a picture: the tokens twice, lines between them, those of the chosen token strong. */
export function attentionPicture(tokens, weights, chosen) {
  const wide = MARGIN + LETTER * Math.max(...tokens.map((token) => [...token].length));
  const [from, to] = [wide, wide + 220];
  const height = (place) => MARGIN + (place + 0.5) * ROW;
  const column = (x, anchor, bold) =>
    tokens.map((token, place) => label(token, x, height(place), anchor, bold && place === chosen));
  const lines = weights.flatMap((row, source) =>
    row.flatMap((weight, target) => {
      if (weight < FAINTEST || (tokens.length > 64 && source !== chosen)) return [];
      const ends = { x1: from + 6, y1: height(source), x2: to - 6, y2: height(target) };
      const lit = source === chosen;
      const look = { "stroke-width": lit ? 0.8 + 5 * weight : 1, opacity: lit ? 0.35 + 0.65 * weight : 0.3 * weight };
      return [draw("line", { ...ends, ...look, class: lit ? "picture-strong" : "picture-soft" })];
    }),
  );
  const size = [to + wide, 2 * MARGIN + tokens.length * ROW];
  return framed(size, [...lines, ...column(from, "end", true), ...column(to, "start", false)]);
}

/** Cosines as a picture: shaded cells with their numbers, the texts beside the rows. */
export function matrixPicture(similarity, texts) {
  const side = 52;
  const wide = MARGIN + LETTER * Math.min(48, Math.max(...texts.map((text) => [...text].length)));
  const cells = similarity.flatMap((row, i) =>
    row.flatMap((value, j) => {
      const [x, y] = [wide + j * side, MARGIN + i * side];
      const look = i === j ? { class: "picture-sunk" } : { class: "picture-accent", opacity: warmth(value) };
      const square = draw("rect", { x: x + 2, y: y + 2, width: side - 4, height: side - 4, rx: 6, ...look });
      return [square, label(value.toFixed(2), x + side / 2, y + side / 2, "middle", false)];
    }),
  );
  const names = texts.map((text, i) => label(text.slice(0, 48), wide - 8, MARGIN + (i + 0.5) * side, "end", false));
  return framed([wide + side * texts.length + MARGIN, 2 * MARGIN + side * texts.length], [...cells, ...names]);
}

/** Save a picture as a file. */
export function saveSvg(svg, name) {
  hand(new Blob([standalone(svg)], { type: "image/svg+xml" }), `${name}.svg`);
}

/** Save a picture as pixels. */
export async function savePng(svg, name) {
  const [width, height] = sizeOf(svg);
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([standalone(svg)], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: SCALE * width, height: SCALE * height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  canvas.toBlob((blob) => hand(blob, `${name}.png`), "image/png");
}

/** The picture as text that needs no style sheet, on the ground of the page. */
export function standalone(svg) {
  const copy = svg.cloneNode(true);
  const place = svg.isConnected ? null : document.body.appendChild(svg); // only what is on the page has computed styles
  const [width, height] = sizeOf(svg);
  const pairs = [svg, ...svg.querySelectorAll("*")].map((each, number) => [each, [copy, ...copy.querySelectorAll("*")][number]]);
  for (const [shown, kept] of pairs) {
    const computed = getComputedStyle(shown);
    for (const style of STYLES) kept.setAttribute(style, computed.getPropertyValue(style));
    kept.removeAttribute("class");
    kept.removeAttribute("style");
  }
  place?.remove();
  Object.entries({ xmlns: "http://www.w3.org/2000/svg", width, height }).forEach(([name, value]) => copy.setAttribute(name, value));
  const ground = getComputedStyle(document.body).backgroundColor;
  copy.prepend(draw("rect", { width: "100%", height: "100%", fill: ground }));
  return new XMLSerializer().serializeToString(copy);
}

function sizeOf(svg) {
  const { width, height } = svg.viewBox.baseVal;
  return [Math.ceil(width), Math.ceil(height)];
}

function framed([width, height], children) {
  return draw("svg", { class: "picture", viewBox: `0 0 ${Math.ceil(width)} ${Math.ceil(height)}` }, ...children);
}

function label(text, x, y, anchor, bold) {
  return draw("text", { x, y, dy: "0.35em", "text-anchor": anchor, class: bold ? "picture-bold" : "picture-text" }, text);
}

/** Give a file to the person who reads the page. */
function hand(blob, name) {
  const address = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
