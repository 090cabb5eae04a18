// Does B follow A? And a short dialogue to click through.

import { field, make, percent, withNumber } from "./elements.js";

const EXAMPLES = [
  {
    name: "Coffee",
    texts: ["We got some time.", "Should we get some coffee?"],
    notice: "“We” and “some” are in both. Write “Let us drink coffee.” for B, which shares no word: does it still follow?",
  },
  {
    name: "At sea",
    texts: ["The ship left the harbour at dawn.", "By noon the coast was out of sight."],
    notice: "What it gets wrong: swap the two sentences. A small model uses the topic, and hardly the order.",
  },
  {
    name: "Out of place",
    texts: ["The ship left the harbour at dawn.", "Mitochondria are found in most cells of plants and animals."],
    notice: "Another topic is easy to tell. Try a second sentence about ships that does not follow.",
  },
];
// Each turn: the line that goes on, and a stray one.
const OPENING = "We got some time.";
const TURNS = [
  ["Should we get some coffee?", "The treaty was signed in 1648."],
  ["Yes, there is a small place by the river.", "Sodium is a soft, silvery metal."],
  ["Do they bake their own bread?", "The team won four matches that season."],
  ["They do, and the owner plays the piano in the evening.", "The county had 4,512 inhabitants in 2010."],
  ["Then we should stay for dinner.", "Most beetles have two pairs of wings."],
];
const HOW_TO = "Press the line that continues the dialogue, or the stray one, and see the model's prediction.";
const THE_END = "That was all. Each line shows how sure the model was that it follows the one before.";

export const next = {
  id: "next",
  title: "Does B follow A?",
  group: "Ask",
  abilities: ["next"],
  lead:
    "In pre-training, half of the pairs were neighbours in a text and half were strangers. " +
    "The model still tells them apart.",
  absence: "This requires a pre-trained model with its next-sentence head.",
  remedy: ["bertsmith serve"],
  build,
};

function build(frame) {
  const first = field("A", { lines: 2, value: EXAMPLES[0].texts[0] });
  const second = field("B", { lines: 2, value: EXAMPLES[0].texts[1] });
  frame.inputs.append(make("div", { class: "pair" }, first.root, second.root));
  const set = ({ texts: [one, two] }) => ((first.box.value = one), (second.box.value = two));
  frame.tools([], EXAMPLES.map((example) => ({ ...example, set: () => set(example) })));
  frame.keep("first", first.box);
  frame.keep("second", second.box);
  frame.carries(first.box);
  const talk = make("section", { class: "card talk", "aria-label": "A dialogue to click through" });
  frame.result.after(talk);
  function body() {
    const asked = { first: first.box.value, second: second.box.value };
    return asked.first.trim() && asked.second.trim() ? asked : "Write both sentences.";
  }
  frame.live("next", body, (reply, _, { place }) => show(place, reply));
  converse(frame, talk);
}

function show(result, { follows, probability }) {
  const said = follows ? "Yes, B follows A." : "No, B comes from somewhere else.";
  const verdict = make("p", { class: follows ? "verdict" : "verdict unsure" }, said);
  result.replaceChildren(verdict, gauge(probability));
  return `${said} ${percent(probability)}`;
}

function gauge(probability) {
  const track = withNumber(make("span", { class: "bar-track", "aria-hidden": "true" }), "--share", probability);
  const ends = ["stranger", `${percent(probability)} next`].map((end) => make("span", {}, end));
  return make("div", { class: "gauge" }, track, make("span", { class: "ends" }, ...ends));
}

/** At each turn two lines to choose from, with the chance that each follows what was said last. */
function converse(frame, place) {
  const said = make("ol", { class: "said", "aria-live": "polite" });
  const choices = make("div", { class: "choices" });
  const note = make("p", { class: "lead" }, HOW_TO);
  const restart = make("button", { type: "button", class: "quiet", click: begin }, "Start again");
  place.append(make("div", { class: "heading" }, make("h3", {}, "A dialogue"), restart), note, said, choices);

  function begin() {
    said.replaceChildren(make("li", {}, OPENING));
    offer(OPENING, 0);
  }
  async function say(before, line, turn) {
    for (const button of choices.children) button.disabled = true;
    await frame.try(async () => {
      const { follows, probability } = await frame.ask("next", { first: before, second: line });
      const mark = make("span", { class: follows ? "chance" : "chance stray" }, percent(probability));
      said.append(make("li", {}, line, " ", mark));
      offer(line, turn + 1);
      choices.querySelector("button")?.focus({ preventScroll: true });
    });
  }
  function offer(before, turn) {
    const lines = TURNS[turn] ?? [];
    const ordered = turn % 2 ? [...lines].reverse() : lines;
    const press = (line) => ({ type: "button", class: "line", click: () => say(before, line, turn) });
    choices.replaceChildren(...ordered.map((line) => make("button", press(line), line)));
    if (!lines.length) choices.append(make("p", { class: "lead" }, THE_END));
  }
  begin();
}
