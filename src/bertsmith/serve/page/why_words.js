// Which words decided: every word left out once, and shaded by what the outcome loses without it.

import { pieces } from "./codepoints.js";
import { make, percent, withNumber } from "./elements.js";
import { ApiError } from "./server.js";

const FAINTEST = 0.08; // of the strongest: fainter shades are not shown

/** Whether "Why?" was pressed for the texts as they are; the address keeps it. */
export function openedWhy(frame) {
  const opened = { yes: false, remember: () => ((opened.yes = true), frame.remember()) };
  const set = (value) => (opened.yes = value === "1");
  frame.keep("why", { get: () => (opened.yes ? "1" : ""), set, clear: () => set("") });
  return opened;
}

/** A button, and in its place, once pressed, the shaded texts; `ask(signal)` gives the reply of /look/words. */
export function whySection(ask, texts, opened) {
  const section = make("section", { class: "why-section" });
  const button = make("button", { type: "button", class: "quiet" }, "Why?");
  async function open() {
    button.disabled = true;
    try {
      section.replaceChildren(...shadedTexts(await ask(), texts));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      section.replaceChildren(make("p", { class: "note wrong" }, error.message));
    }
  }
  button.addEventListener("click", async () => {
    opened.remember();
    await open();
    section.tabIndex = -1;
    section.focus({ preventScroll: true });
  });
  section.append(button);
  if (opened.yes) open();
  return section;
}

/** The texts with their words shaded, and what the shades say. */
export function shadedTexts({ outcome, value, words }, texts) {
  const strongest = Math.max(1e-9, ...words.map(({ change }) => Math.abs(change)));
  const shaded = texts.map((text, part) => {
    const spans = words.filter((word) => word.part === part);
    const children = pieces(text, spans).map(({ text: piece, span }) => (span ? word(piece, span.change, strongest) : piece));
    return make("p", { class: "passage", dir: "auto" }, ...children);
  });
  const name = outcome === "score" ? "the score" : `“${outcome || "no answer"}”`;
  const lead = `Each word left out once. Coloured words carry ${name} (${shareOf(outcome, value)}): without them it loses as much.`;
  const legend = [["for", `speaks for ${name}`], ["against", "speaks against it"]];
  const entries = legend.map(([side, said]) => make("li", { class: side }, said));
  return [make("h3", {}, "Why?"), make("p", { class: "lead" }, lead), ...shaded, make("ul", { class: "legend" }, ...entries)];
}

const shareOf = (outcome, value) => (outcome === "score" ? value.toFixed(2) : percent(value));

function word(text, change, strongest) {
  const weight = Math.abs(change) / strongest;
  const title = `${change > 0 ? "−" : "+"}${(100 * Math.abs(change)).toFixed(1)} points without it`;
  const side = weight < FAINTEST ? "" : change > 0 ? "for" : "against";
  return withNumber(make("span", { class: `weighed ${side}`, title }, text), "--weight", weight.toFixed(3));
}
