// Which words decided: each text with its words shaded for and against its class.

import { choice, make, percent, quoted, withNumber } from "./elements.js";
import { scrolling } from "./report_tables.js";

/** Fill the page; the shades are those of one method, which the reader chooses. */
export function show(root, data) {
  const texts = data.texts.map(explained);
  const method = choice("Shade by", data.methods.map((name) => [name, name]), { change: turn });
  function turn() {
    texts.forEach(({ shade }) => shade(method.box.value));
    root.dataset.ready = "true";
  }
  const legend = make("p", { class: "note" }, "", swatch("for"), " speaks for the class, ", swatch("against"), " against it.");
  root.append(make("p", { class: "lead" }, data.lead), faithfulness(data), make("div", { class: "row" }, method.root), legend);
  root.append(...texts.map(({ root: card }) => card));
  turn();
}

const swatch = (kind) => withNumber(make("span", { class: `view-word ${kind}` }, kind === "for" ? "this" : "that"), "--size", 0.7);

function explained({ label, probability, words, scores }) {
  const marks = words.map((word) => make("span", { class: "view-word", tabindex: 0 }, quoted(word)));
  const spoken = make("p", { class: "note", role: "status" });
  let values = [];
  marks.forEach((mark, number) =>
    ["mouseenter", "focus"].forEach((event) => mark.addEventListener(event, () => tell(number))),
  );
  function tell(number) {
    spoken.textContent = `“${words[number]}”: ${values[number].toFixed(4)}`;
  }
  function shade(method) {
    values = scores[method];
    const most = Math.max(...values.map(Math.abs), 1e-12);
    marks.forEach((mark, number) => {
      mark.classList.toggle("for", values[number] > 0);
      mark.classList.toggle("against", values[number] < 0);
      withNumber(mark, "--size", (Math.abs(values[number]) / most).toFixed(3));
    });
    tell(values.indexOf(Math.max(...values)));
  }
  const running = make("p", { class: "running", dir: "auto" }, ...marks);
  const heading = make("h2", { class: "section" }, quoted(label), ` ${percent(probability)}`);
  return { root: make("section", { class: "card" }, heading, running, spoken), shade };
}

function faithfulness({ faithfulness: rows, methods }) {
  const cells = (kind, values) => values.map((value) => make(kind, {}, value));
  const head = make("tr", {}, ...cells("th", ["method", "comprehensiveness", "sufficiency"]));
  const lines = [...methods, "random"].map((name) =>
    make("tr", {}, ...cells("td", [name, ...rows[name].map((value) => value.toFixed(3))])),
  );
  const says =
    "How much the class's probability falls without the words that a method ranks first (more is better), " +
    "and with these words alone (less is better).";
  const table = scrolling(make("table", {}, head, ...lines), "How faithful the methods are");
  return make("section", { class: "card" }, table, make("p", { class: "note" }, says));
}
