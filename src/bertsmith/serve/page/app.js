// The playground: ask for the models, then put up the panels that they can fill.

import { PanelFrame } from "./panel_frame.js";
import { field, make } from "./elements.js";
import { answer } from "./panel_answer.js";
import { attention } from "./panel_attention.js";
import { choose } from "./panel_choose.js";
import { classify } from "./panel_classify.js";
import { compare } from "./panel_compare.js";
import { entities } from "./panel_entities.js";
import { fill } from "./panel_fill.js";
import { modelsPanel } from "./panel_models.js";
import { next } from "./panel_next.js";
import { senses } from "./panel_senses.js";
import { tokens } from "./panel_tokens.js";
import { ask, KeyWanted, ApiError, useKey } from "./server.js";
import { putUpTabs } from "./tabs.js";

const PANELS = [fill, answer, classify, choose, entities, next, compare, tokens, attention, senses];
const opening = document.getElementById("opening");

async function start() {
  try {
    const { models } = await ask("models");
    opening.remove();
    putUp(models);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    opening.classList.toggle("wrong", !(error instanceof KeyWanted));
    opening.textContent = error.message;
  }
}

function putUp(models) {
  const can = (model, abilities) => abilities.some((each) => model.abilities.includes(each));
  const able = ({ abilities }) => models.filter((model) => can(model, abilities));
  const present = PANELS.filter((panel) => able(panel).length);
  const entries = present.map((panel) => entryOf(panel, able(panel)));
  const missing = PANELS.filter((panel) => !present.includes(panel));
  document.getElementById("summary").textContent = `playground · ${models.map(({ name }) => name).join(", ")}`;
  const [list, place] = ["tabs", "panels"].map((id) => document.getElementById(id));
  putUpTabs(list, place, [...entries, modelsPanel(models, missing)]);
}

/** What the tabs need of a panel; it is built when it is first shown. */
function entryOf(panel, models) {
  let frame = null;
  function fill(root) {
    frame = new PanelFrame(root, panel, models);
    panel.build(frame);
    frame.arrive();
  }
  return { ...panel, fill, arrive: () => frame.arrive(), address: () => frame?.address };
}

/** A button that turns light to dark and back, whatever the system says, and remembers it. */
function wireTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const name = document.getElementById("theme-name");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  function changed() {
    name.textContent = isDark() ? "Light" : "Dark";
    document.dispatchEvent(new CustomEvent("themechange"));
  }
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
    changed();
  });
  system.addEventListener("change", changed);
  changed();
}

/** Where the server asks for a key, a field for it. */
function askForKey() {
  if (document.getElementById("key")) return;
  const key = field("This server asks for a key", { type: "password", id: "key" });
  const submit = (event) => {
    event.preventDefault();
    useKey(key.box.value);
    location.reload();
  };
  const form = make("form", { class: "card key", submit }, key.root, make("button", { type: "submit" }, "Use it"));
  document.getElementById("panels").prepend(form);
}

document.addEventListener("keywanted", askForKey);
wireTheme();
start();
