// What every panel has: a heading, a model, examples, a place for the result and one line for what went wrong.

import { choice, make } from "./elements.js";
import { latest } from "./latest.js";
import { ask, ApiError } from "./server.js";

/** The frame of a panel, and its requests to the server. */
export class PanelFrame {
  constructor(root, { title, lead }, models) {
    this.models = models;
    this.inputs = make("form", { class: "inputs", submit: (event) => event.preventDefault() });
    this.note = make("p", { class: "note", role: "status" });
    this.result = make("div", { class: "result" });
    this.spoken = make("p", { class: "unseen", "aria-live": "polite" });
    this.idle = null; // for a panel that shows something before there is an answer: says whether it did
    this.chooser = this.#chooser();
    const heading = make("div", { class: "heading" }, make("h2", {}, title), this.chooser.root);
    if (this.chooser.root.hidden) heading.append(make("span", { class: "quiet-number" }, models[0].name));
    root.append(heading, make("p", { class: "lead" }, lead), this.inputs, this.note, this.result, this.spoken);
  }

  /** The model that the panel uses, as /models describes it. */
  get model() {
    return this.models.find(({ name }) => name === this.chooser.box.value);
  }

  /** A row of controls, and after them buttons that set the fields, which it returns: each is [name, what to do]. */
  tools(controls, entries) {
    const buttons = entries.map(([name, act]) => {
      const click = () => (act(), this.refresh?.({ now: true }));
      return make("button", { type: "button", class: "chip", click }, name);
    });
    const group = make("div", { class: "examples", role: "group", "aria-label": "Examples" }, "Try", ...buttons);
    this.inputs.append(make("div", { class: "row" }, ...controls, group));
    return buttons;
  }

  /** The server's reply for the chosen model. */
  ask(path, body, signal) {
    return ask(path, { ...body, model: this.model.name }, signal);
  }

  /**
   * Ask whenever a field or the model changes. `question()` gives the body, or a hint in its place where there
   * is nothing to ask yet; `show(reply, body)` fills the result and returns what a screen reader says.
   */
  live(path, question, show, pause = 250) {
    const work = async (signal) => {
      const body = question();
      if (typeof body === "string") return this.hint(body);
      const answer = async () => {
        const reply = await this.ask(path, body, signal);
        if (!signal.aborted) this.spoken.textContent = show(reply, body) ?? "";
      };
      await this.try(answer, () => this.#clear());
    };
    const again = latest(work, pause);
    this.refresh = (how) => {
      if (typeof question() !== "string") this.#reading();
      again(how);
    };
    this.inputs.addEventListener("input", () => this.refresh());
    this.chooser.box.addEventListener("change", () => this.refresh({ now: true }));
    this.refresh({ now: true });
  }

  /** Do this, with the panel marked as busy; an error of the server is shown in one line, and undone. */
  async try(work, undo = () => {}) {
    this.result.setAttribute("aria-busy", "true");
    try {
      await work();
      this.#say("", "note");
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.#say(error.message, "note wrong");
      undo();
    }
    this.result.removeAttribute("aria-busy");
  }

  /** Say what is still wanted, and take the result away; what the panel shows without one takes its place. */
  hint(line) {
    this.#say(line, "note");
    this.result.removeAttribute("aria-busy");
    if (!this.idle?.()) this.result.replaceChildren();
    this.spoken.textContent = "";
  }

  /** Take the result away, also from who hears it: it would be taken for that of what is asked now. */
  #clear() {
    this.result.replaceChildren();
    this.spoken.textContent = "";
  }

  /** Take back what was said of the input before; an older result dims, and where there is none a line tells. */
  #reading() {
    this.#say(this.result.hasChildNodes() ? "" : "Reading …", "note");
    this.result.setAttribute("aria-busy", "true");
  }

  #say(line, look) {
    this.note.className = look;
    this.note.textContent = line;
  }

  #chooser() {
    const chooser = choice("Model", this.models.map(({ name }) => [name, name]), { class: "model" });
    chooser.root.hidden = this.models.length < 2;
    return chooser;
  }
}
