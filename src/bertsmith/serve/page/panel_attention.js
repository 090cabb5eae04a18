// Attention: which tokens each head of each layer looks at.

import { headGrid, KINDS, kindsLegend } from "./attention_grid.js";
import { attentionLines } from "./attention_lines.js";
import { saveButtons, tick } from "./controls.js";
import { choice, field, make, percent } from "./elements.js";
import { headSteps } from "./head_steps.js";
import { latest } from "./latest.js";
import { attentionPicture } from "./pictures.js";

const EXAMPLES = [
  {
    name: "Animal",
    texts: ["The animal was tired, so it did not cross the street.", ""],
    notice: "It opens on the head in which “it” reads one word most. Put “tired” last, as in the next example.",
  },
  {
    name: "Street",
    texts: ["The animal did not cross the street because it was too tired.", ""],
    notice: "What it gets wrong: a small model reads the nearer “street”. Put “wide” for “tired”: is it the same?",
  },
  {
    name: "A pair",
    texts: ["The cat sat on the mat.", "It purred and fell asleep."],
    notice: "“It” is in the second sentence and reads the first across [SEP]: heads join the two.",
  },
  {
    name: "Who gave?",
    texts: ["Maria gave her brother the book that he had wanted.", ""],
    notice: "Look through the heads: some only read the token before or after, in any sentence.",
  },
];
const MEAN = "mean";
const PAUSE = 120; // milliseconds before the steps of another token are asked for

export const attention = {
  id: "attention",
  title: "Attention",
  group: "Look inside",
  abilities: ["look"],
  lead:
    "Every head of every layer decides, for each token, which tokens to read from. " +
    "Choose a head, then a token on the left.",
  absence: "Any model can do this.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const first = field("A", { lines: 2, value: EXAMPLES[0].texts[0] });
  const second = field("B, if there is one", { lines: 2, value: "" });
  frame.inputs.append(make("div", { class: "pair" }, first.root, second.root));
  const set = ({ texts: [one, two] }) => ((first.box.value = one), (second.box.value = two), chosen.forget());
  frame.tools([], EXAMPLES.map((example) => ({ ...example, set: () => set(example) })));
  const chosen = new Chosen();
  frame.keep("first", first.box);
  frame.keep("second", second.box);
  frame.keep("head", chosen);
  frame.carries(first.box);
  first.box.addEventListener("input", () => chosen.forget());
  function body() {
    if (!first.box.value.trim()) return "Write a text.";
    return { first: first.box.value, second: second.box.value.trim() ? second.box.value : null };
  }
  async function show(reply, asked, { place, model }) {
    const view = new HeadsView(frame, { reply, asked, model, chosen });
    await view.fetch();
    place.replaceChildren(view.root);
    view.turnTo({});
    return `${reply.tokens.length} tokens, ${reply.maps.length} layers of ${reply.maps[0].length} heads.`;
  }
  frame.live("look/heads", body, show, 350);
}

/** Which layer, head and token are looked at, and how; what is not chosen yet, the server's moment decides. */
class Chosen {
  layer = null;
  head = null; // MEAN for all heads of the layer
  token = null;
  hides = false;
  steps = false;

  /** Forget what belongs to a text; the head stays if it was chosen by hand. */
  forget() {
    this.token = null;
    if (!this.byHand) this.layer = this.head = null;
  }
  settle({ tokens, maps, moment }) {
    const opening = moment ?? { layer: Math.min(1, maps.length - 1), head: 0, token: Math.min(1, tokens.length - 1) };
    this.layer = Math.min(this.layer ?? opening.layer, maps.length - 1);
    this.head ??= opening.head;
    if (this.head !== MEAN) this.head = Math.min(this.head, maps[0].length - 1);
    this.token = Math.min(this.token ?? opening.token, tokens.length - 1);
  }
  get() {
    if (this.layer === null) return "";
    return [this.layer, this.head, this.token, Number(this.hides), Number(this.steps)].join(".");
  }
  set(value) {
    const [layer, head, token, hides, steps] = value.split(".");
    Object.assign(this, { layer: Number(layer), head: head === MEAN ? MEAN : Number(head), token: Number(token) });
    Object.assign(this, { hides: hides === "1", steps: steps === "1", byHand: true });
  }
}

/** All heads in small, one of them at large, and how it comes to what it reads. */
class HeadsView {
  #fetched = new Map(); // weights by layer and head: each is asked for once

  constructor(frame, { reply, asked, model, chosen }) {
    Object.assign(this, { frame, reply, asked, model, chosen });
    chosen.settle(reply);
    const { maps, kinds, tokens } = reply;
    this.grid = headGrid(reply, (layer, head) => this.turnTo({ layer, head, byHand: true }));
    this.lines = attentionLines(tokens, (token, pressed) => this.#picked(token, pressed));
    const turn = (name, value) => this.turnTo({ [name]: value, byHand: true });
    this.layer = choice("Layer", numbered(maps.length), { change: (event) => turn("layer", Number(event.target.value)) });
    const heads = [...numbered(maps[0].length), [MEAN, "mean of all"]];
    this.head = choice("Head", heads, { change: ({ target: { value } }) => turn("head", value === MEAN ? MEAN : Number(value)) });
    this.hides = tick("Hide special tokens", { change: (event) => this.turnTo({ hides: event.target.checked }) });
    this.steps = tick("Step by step", { change: (event) => this.turnTo({ steps: event.target.checked }) });
    this.kind = make("p", { class: "lead kind-of-head" });
    this.below = make("div", { class: "below" });
    this.askSteps = latest((signal) => this.#showSteps(signal), PAUSE);
    const save = saveButtons(() => attentionPicture(tokens, this.weights, chosen.token), "attention");
    const controls = make("div", { class: "row" }, this.layer.root, this.head.root, this.hides.root, this.steps.root, save);
    const close = make("section", { class: "card close" }, controls, this.kind, this.lines.root);
    const overview = make("section", { class: "card" }, make("h3", {}, "All heads"), this.grid.root, kindsLegend(kinds));
    this.root = make("div", {}, this.below, make("div", { class: "split" }, close, overview));
  }

  async turnTo(change) {
    const { chosen } = this;
    Object.assign(chosen, change);
    this.layer.box.value = String(chosen.layer);
    this.head.box.value = String(chosen.head);
    this.hides.box.checked = chosen.hides;
    this.steps.box.checked = chosen.steps;
    this.grid.mark(chosen.layer, chosen.head === MEAN ? null : chosen.head);
    this.kind.textContent = kindOf(this.reply.kinds, chosen);
    if (Object.keys(change).length) this.frame.remember();
    await this.frame.aside(async () => {
      const wanted = this.#key;
      const weights = await this.fetch();
      if (wanted !== this.#key) return; // another head was chosen meanwhile
      this.weights = weights;
      this.lines.hide(chosen.hides ? this.reply.special.flatMap((is, place) => (is ? [place] : [])) : []);
      this.lines.show(weights, chosen.token);
    });
    this.askSteps();
  }

  #picked(token, pressed) {
    if (token === this.chosen.token && !pressed) return;
    this.chosen.token = token;
    if (pressed) this.frame.remember();
    this.askSteps();
  }

  get #key() {
    return `${this.chosen.layer}.${this.chosen.head}`;
  }

  /** The weights of the chosen head. */
  async fetch() {
    const key = this.#key;
    if (!this.#fetched.has(key)) {
      const [layer, head] = [this.chosen.layer, this.chosen.head === MEAN ? null : this.chosen.head];
      const reply = await this.frame.ask("look/head", { ...this.asked, layer, head }, undefined, this.model);
      this.#fetched.set(key, reply.weights);
    }
    return this.#fetched.get(key);
  }

  async #showSteps(signal) {
    const { layer, head, token, steps } = this.chosen;
    if (!steps) return this.below.replaceChildren();
    if (head === MEAN) return this.below.replaceChildren(make("p", { class: "note" }, "Choose one head to see its steps."));
    await this.frame.aside(async () => {
      const reply = await this.frame.ask("look/head-steps", { ...this.asked, layer, head, token }, signal, this.model);
      const title = make("h3", {}, `Layer ${layer + 1}, head ${head + 1}, step by step`);
      this.below.replaceChildren(make("section", { class: "card" }, title, headSteps(reply, this.reply.tokens, token)));
    });
  }
}

function kindOf(kinds, { layer, head }) {
  if (head === MEAN) return "The mean of all heads of this layer.";
  const { kind, share } = kinds[layer][head];
  const clear = kind === "broad" || kind === "mixed" ? "" : ` (${percent(share)} of its attention)`;
  return `On this text this head ${KINDS[kind][1]}${clear}.`;
}

const numbered = (count) => Array.from({ length: count }, (_, number) => [String(number), String(number + 1)]);
