// One head, step by step, with the numbers of one token: query, keys, scores, softmax, values, sum.

import { make, percent, quoted, withNumber } from "./elements.js";
import { largestOf, vectorStrip } from "./vector_strip.js";

/** The steps by which a token comes to read others, from the reply of /look/head-steps. */
export function headSteps(reply, tokens, token) {
  const width = reply.query.length;
  const keyed = largestOf([...reply.query, ...reply.keys.flat()]);
  const valued = largestOf([...reply.values.flat(), ...reply.output]);
  const rest = Math.max(0, 1 - reply.most_read.reduce((sum, place) => sum + reply.weights[place], 0));
  const rows = reply.most_read.map((place, number) => {
    const score = reply.scores[place];
    const cells = [
      make("td", { class: "strip-cell" }, vectorStrip(reply.keys[number], keyed, "Key:")),
      make("td", { class: "figure" }, (score * Math.sqrt(width)).toFixed(2)),
      make("td", { class: "figure" }, score.toFixed(2)),
      make("td", { class: "figure" }, shareBar(reply.weights[place])),
      make("td", { class: "strip-cell" }, vectorStrip(reply.values[number], valued, "Value:")),
    ];
    return make("tr", {}, make("th", { scope: "row" }, quoted(tokens[place])), ...cells);
  });
  const titles = ["", "its key", "query · key", `÷ √${width}`, "softmax", "its value"];
  const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title || make("span", { class: "unseen" }, "token"))));
  const table = make("table", { class: "steps" }, make("thead", {}, head), make("tbody", {}, ...rows));
  const region = { class: "wide", tabindex: "0", role: "region", "aria-label": "Steps of the head" };
  return make(
    "div",
    { class: "head-steps" },
    step(1, ["“", quoted(tokens[token]), "” asks with its query:"], vectorStrip(reply.query, keyed, "Query:")),
    step(2, ["Each token answers with its key. Their product says how well they fit; softmax makes shares of it:"]),
    make("div", region, table),
    make("p", { class: "lead" }, `The other ${tokens.length - rows.length} tokens together get ${percent(rest)}.`),
    step(3, ["The values, each times its share, are added up. This is what “", quoted(tokens[token]), "” takes along:"],
      vectorStrip(reply.output, valued, "Sum:")),
  );
}

function step(number, text, strip = null) {
  const line = make("p", {}, make("span", { class: "number" }, String(number)), ...text);
  return make("div", { class: "step" }, line, strip);
}

function shareBar(share) {
  const track = withNumber(make("span", { class: "bar-track", "aria-hidden": "true" }), "--share", share);
  return make("span", { class: "share" }, percent(share), track);
}
