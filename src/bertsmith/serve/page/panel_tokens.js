// What BERT sees: tokens, the three embeddings that are added up, and a fresh masking.

import { field, make, quoted, walkable } from "./elements.js";
import { largestOf, vectorStrip } from "./vector_strip.js";

const EXAMPLES = [
  {
    name: "A pair",
    texts: ["My dog is cute.", "He likes playing in the snow."],
    notice: "Press a token to see its vector. BERT adds those of its segment and position; newer members of the family may not.",
  },
  {
    name: "Rare words",
    texts: ["The blacksmith unhooked the samovar.", "Its chimney clattered quixotically."],
    notice: "A word that is not in the vocabulary is put together from pieces; ## continues a word.",
  },
  {
    name: "Emoji",
    texts: ["We had ramen 🍜 in Kyōto.", "It was unforgettable!"],
    notice: "Characters outside the vocabulary become [UNK]: for the model they are all the same.",
  },
];
const FATES = {
  mask: "hidden behind the mask token",
  random: "swapped for a random token",
  kept: "left as it is",
};

export const tokens = {
  id: "tokens",
  title: "What BERT sees",
  group: "Look inside",
  abilities: ["look"],
  lead:
    "Text becomes pieces of words, and each piece a vector, to which BERT adds those of its segment and position. " +
    "In training 15 % of them are chosen to be guessed: of these 80 % are hidden, 10 % swapped, 10 % left alone.",
  absence: "Any model can do this.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const first = field("A", { lines: 2, value: EXAMPLES[0].texts[0] });
  const second = field("B, if there is one", { lines: 2, value: EXAMPLES[0].texts[1] });
  let seed = Math.floor(Math.random() * 1e6);
  const redraw = () => ((seed += 1), frame.changed({ now: true }));
  const button = make("button", { type: "button", click: redraw }, "Draw another masking");
  frame.inputs.append(make("div", { class: "pair" }, first.root, second.root));
  const set = ({ texts: [one, two] }) => ((first.box.value = one), (second.box.value = two));
  frame.tools([button], EXAMPLES.map((example) => ({ ...example, set: () => set(example) })));
  const chosen = { token: 1 };
  frame.keep("first", first.box);
  frame.keep("second", second.box);
  frame.keep("seed", { get: () => seed, set: (value) => (seed = Number(value)) });
  frame.keep("token", { get: () => chosen.token, set: (value) => (chosen.token = Number(value)) });
  frame.carries(first.box);
  function body() {
    if (!first.box.value.trim()) return "Write a text.";
    return { first: first.box.value, second: second.box.value.trim() ? second.box.value : null, seed };
  }
  frame.live("look/tokens", body, async (reply, { first: one, second: two }, { place, model }) => {
    const strips = make("section", { class: "card strips" });
    const ask = async (token) => {
      const { parts } = await frame.ask("look/embedding", { first: one, second: two, token }, undefined, model);
      if (chosen.token === token) strips.replaceChildren(...embeddingStrips(parts, reply.tokens[token].text));
      return parts.map(({ name }) => name);
    };
    chosen.token = Math.min(chosen.token, reply.tokens.length - 1);
    const added = await ask(chosen.token);
    const said = show(place, reply.tokens, { chosen: chosen.token, added }, (token) => {
      chosen.token = token;
      frame.remember();
      frame.aside(() => ask(token));
    });
    place.append(strips);
    return said;
  });
}

/** The vectors that are added up for a token, one strip below the other. */
function embeddingStrips(parts, token) {
  const largest = largestOf(parts.filter(({ name }) => name !== "normalised").flatMap(({ values }) => values));
  const rows = parts.flatMap(({ name, values }, place) => {
    const sign = name === "sum" ? "= " : place && name !== "normalised" ? "+ " : "";
    const strip = vectorStrip(values, name === "normalised" ? largestOf(values) : largest, name);
    return [make("span", { class: "strip-name" }, `${sign}${name}`), strip];
  });
  const title = make("h3", {}, "The input of the first layer for “", quoted(token), "”");
  const lead = "A cell for each number: one colour above 0, the other below, the stronger the larger.";
  const notes = [lead, without(parts.map(({ name }) => name))].filter(Boolean);
  return [title, make("div", { class: "strip-rows" }, ...rows), ...notes.map((line) => make("p", { class: "lead" }, line))];
}

/** What a model that does not add all three vectors does instead. */
function without(added) {
  const missing = ["segment", "position"].filter((name) => !added.includes(name));
  if (!missing.length) return "";
  const instead = {
    segment: "[SEP] alone parts A from B",
    position: "attention adds the positions, from the distance of two tokens",
  };
  return `This model adds no vector of ${missing.join(" or ")}: ${missing.map((name) => instead[name]).join(", and ")}.`;
}

function show(result, seen, { chosen, added }, pick) {
  const count = (fate) => seen.filter(({ masking }) => masking === fate).length;
  const entry = ([fate, text]) => make("li", { class: `fate-${fate}` }, `${text} × ${count(fate)}`);
  const fates = Object.entries(FATES).map(entry);
  const names = ["", "token", "segment", "position"].map((row) =>
    make("span", {}, row !== "token" && added.includes(row) ? `+ ${row}` : row),
  );
  const rows = make("li", { class: "token rows", "aria-hidden": "true" }, ...names);
  const columns = seen.map(column);
  const summary = `${seen.length - count("")} of ${seen.length} tokens are to be guessed.`;
  result.replaceChildren(
    make("p", { class: "lead" }, summary),
    make("ul", { class: "legend" }, ...fates),
    make("ol", { class: "tokens" }, rows, ...columns),
  );
  const pieces = columns.map((each) => each.querySelector(".piece"));
  const reach = walkable(pieces);
  function mark(token) {
    pieces.forEach((piece, number) => piece.setAttribute("aria-pressed", String(number === token)));
    reach(token);
  }
  pieces.forEach((piece, number) => piece.addEventListener("click", () => (mark(number), pick(number))));
  mark(chosen);
  return summary;
}

function column({ text, id, segment, position, masking, shown }) {
  const changed = masking === "mask" || masking === "random";
  const was = make("span", { class: "was" }, quoted(changed ? text : masking));
  const title = `${text}, id ${id}${masking ? `: ${FATES[masking]}` : ""}`;
  return make(
    "li",
    { class: masking ? `token fate-${masking}` : "token", title },
    was,
    make("button", { type: "button", class: "piece" }, quoted(changed ? shown : text)),
    make("span", { class: `segment segment-${segment % 2}` }, "AB"[segment] ?? String(segment)),
    make("span", { class: "position" }, String(position)),
  );
}
