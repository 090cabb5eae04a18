// One word, many senses: the vectors of a word in several sentences, on a map.

import { brief } from "./codepoints.js";
import { layerSlider, saveButtons, tick } from "./controls.js";
import { field, make } from "./elements.js";
import { sensesMap } from "./senses_map.js";

const EXAMPLES = [
  {
    name: "apple",
    lines:
      "She ate a green apple from the tree.\nHe peeled an apple and baked a pie.\n" +
      "The apple and the pear are sweet fruits.\nApple released a new computer in March.\n" +
      "Apple sold millions of phones last year.\nThe software runs on Apple computers.",
    notice: "Move the slider from layer 0, where the word is one point, to the last: fruit and company part.",
  },
  {
    name: "bank",
    lines:
      "They sat on the bank of the river.\nTrees grow on the north bank of the lake.\n" +
      "The boat was pulled up on the muddy bank.\nThe bank lent him money to buy a house.\n" +
      "She works for a large bank in the city.\nThe bank raised its interest rates.",
    notice: "After which layer are river banks and money banks apart? Some sentence may stay between.",
  },
  {
    name: "light",
    lines:
      "The light of the sun fell on the floor.\nShe turned off the light in the kitchen.\n" +
      "The box was light enough to carry.\nA light rain fell in the morning.\nThey travel at the speed of light.",
    notice: "What it gets wrong: noun and adjective stay one cloud in a small model. Which two are closest?",
  },
];
const MOST = 20;
const LONGEST_WORD = 100; // characters
const SPACED = "[\\p{L}\\p{N}_]";
// The scripts that put no space between words: there a word may stand inside of others.
const UNSPACED = /[\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Thai}\p{scx=Lao}\p{scx=Khmer}\p{scx=Myanmar}]/u;

export const senses = {
  id: "senses",
  title: "One word, many senses",
  group: "Look inside",
  abilities: ["look"],
  lead:
    "A word's vector depends on its sentence. " +
    "Here are the vectors of one word after each layer, in the plane that separates them most.",
  absence: "Any model can do this.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const word = field("Word", { value: EXAMPLES[0].name });
  const text = field("Sentences with it, one per line", { lines: 6, value: EXAMPLES[0].lines });
  frame.inputs.append(word.root, text.root);
  const set = ({ name, lines }) => ((word.box.value = name), (text.box.value = lines));
  const centred = tick("Less their mean", { title: "Subtract the part that all tokens share before comparing" });
  frame.tools([centred.root], EXAMPLES.map((example) => ({ ...example, set: () => set(example) })));
  const chosen = { layer: null };
  frame.keep("word", word.box);
  frame.keep("text", text.box);
  frame.keep("centred", centred.box);
  frame.keep("layer", { get: () => chosen.layer ?? "", set: (value) => (chosen.layer = Number(value)) });
  function body() {
    const wanted = word.box.value.trim();
    const lines = text.box.value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (!wanted) return "Write a word.";
    if (wanted.length > LONGEST_WORD) return `A word of at most ${LONGEST_WORD} characters, please.`;
    const without = lines.findIndex((line) => !holds(line, wanted));
    if (without >= 0) return `“${brief(lines[without])}” does not contain “${wanted}”.`;
    if (lines.length < 2) return `Write two sentences or more with “${wanted}”, one per line.`;
    return lines.length > MOST ? `At most ${MOST} sentences, please.` : { word: wanted, sentences: lines };
  }
  function show(reply, { sentences }, { place }) {
    const map = sensesMap(reply, sentences, { centred: centred.box.checked });
    const slider = layerSlider((layer) => ((chosen.layer = layer), frame.remember(), map.turnTo(layer)));
    const tools = make("div", { class: "row" }, slider.root, saveButtons(() => map.picture, `senses-${word.box.value}`));
    place.replaceChildren(tools, map.root);
    map.turnTo(slider.fit(reply.layers.length - 1, chosen.layer ?? undefined));
    return `${reply.points.length} places of the word.`;
  }
  frame.live("look/senses", body, show, 350);
}

function holds(line, word) {
  const literal = word.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&");
  const letters = [...word];
  const [before, after] = [letters[0], letters.at(-1)].map((letter) => (UNSPACED.test(letter) ? "" : SPACED));
  return new RegExp(`${before && `(?<!${before})`}${literal}${after && `(?!${after})`}`, "iu").test(line);
}
