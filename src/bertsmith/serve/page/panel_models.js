// The models of the server, and the models that missing panels need.

import { make } from "./elements.js";

/** The entry of the last tab. */
export function modelsPanel(models, missing) {
  const badge = missing.length ? `+${missing.length}` : "";
  return { id: "models", title: "Models", group: "This server", badge, fill: (root) => fill(root, models, missing) };
}

function fill(root, models, missing) {
  root.append(make("div", { class: "heading" }, make("h2", {}, "Models of this server")));
  root.append(make("p", { class: "lead" }, "The page shows what these models can do."));
  root.append(make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Models" }, table(models)));
  if (!missing.length) return;
  root.append(make("h3", { class: "section" }, "Missing panels, and the models for them"));
  root.append(make("div", { class: "cards missing" }, ...missing.map(card)));
  const option = make("code", {}, "--model name=folder");
  root.append(make("p", { class: "lead" }, "Give ", option, " once for each model to serve, those of today too."));
}

function table(models) {
  const heads = ["Name", "Can", "Layers", "Heads", "Width", "Longest text"];
  const rows = models.map(({ name, abilities, layers, heads: count, width, longest, loaded }) => {
    const title = make("th", { scope: "row" }, name, loaded === false ? make("small", {}, " opens when asked") : null);
    const cells = [abilities.join(", "), layers, count, width, `${longest} tokens`];
    return make("tr", {}, title, ...cells.map((each) => make("td", {}, String(each))));
  });
  const head = make("tr", {}, ...heads.map((each) => make("th", { scope: "col" }, each)));
  return make("table", { class: "models" }, make("thead", {}, head), make("tbody", {}, ...rows));
}

function card({ id, title, absence, remedy }) {
  const copy = make("button", { type: "button", class: "quiet" }, "Copy");
  copy.addEventListener("click", () => copied(copy, remedy.join("\n")));
  const commands = make("pre", { tabindex: "0" }, make("code", {}, remedy.join("\n")));
  const heading = make("div", { class: "heading" }, make("h3", {}, title), copy);
  return make("section", { class: "card", id: `missing-${id}` }, heading, make("p", {}, absence), commands);
}

async function copied(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it below"; // a page that is not on localhost or https may not write the clipboard
  }
}
