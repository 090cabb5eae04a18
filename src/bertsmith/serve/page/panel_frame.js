// The frame of every panel: a heading, one or two models, examples with hints, a place for the result
// and one line for what went wrong. What it shows is kept in the address, and its sentence goes to the other panels.

import { addressOf, readAddress, writeAddress } from "./address.js";
import { carriedSentence, carry } from "./carried.js";
import { choice, make } from "./elements.js";
import { latest } from "./latest.js";
import { ask, ApiError } from "./server.js";

/** The frame of a panel, and its requests to the server. */
export class PanelFrame {
  #kept = new Map(); // what the address keeps: a getter and a setter by name
  #touched = false; // whether there is something to keep
  #sentence = null; // the field whose text goes to other panels, and how
  #carried = null; // what it took from there last
  #examples = [];
  #notices = new Map(); // what to notice, by the texts of an example

  constructor(root, { id, title, lead }, models) {
    this.id = id;
    this.models = models;
    this.inputs = make("form", { class: "inputs", submit: (event) => event.preventDefault() });
    this.notice = make("p", { class: "notice", hidden: true });
    this.note = make("p", { class: "note", role: "status" });
    this.result = make("div", { class: "result" });
    this.spoken = make("p", { class: "unseen", "aria-live": "polite" });
    this.idle = null; // for a panel that shows something before there is an answer: says whether it did
    this.chooser = this.#chooser("Model", models.map(({ name }) => [name, name]));
    this.beside = this.#chooser("Compare with", [["", "nothing"], ...models.map(({ name }) => [name, name])]);
    this.keep("model", this.chooser.box);
    this.keep("beside", this.beside.box);
    const lone = models.length < 2 ? make("span", { class: "quiet-number" }, models[0].name) : null;
    const choosers = make("div", { class: "choosers" }, lone, this.chooser.root, this.beside.root, linkButton());
    const heading = make("div", { class: "heading" }, make("h2", {}, title), choosers);
    root.append(heading, make("p", { class: "lead" }, lead), this.inputs, this.note, this.result, this.spoken);
  }

  /** The model that the panel uses, as /models describes it. */
  get model() {
    return this.models.find(({ name }) => name === this.chooser.box.value);
  }

  /** A row of controls, and after them buttons that set the fields, which it returns. */
  tools(controls, examples) {
    const buttons = examples.map(({ name, set }) => {
      const click = () => (set(), this.changed({ now: true }));
      return make("button", { type: "button", class: "chip", click }, name);
    });
    const group = make("div", { class: "examples", role: "group", "aria-label": "Examples" }, "Try", ...buttons);
    this.inputs.append(make("div", { class: "row" }, ...controls, group), this.notice);
    this.#examples = examples;
    return buttons;
  }

  /**
   * Keep the value of a field, a box to tick, or anything with `get` and `set` in the address; what has `clear`
   * holds for the texts as they are, and is cleared when something changes.
   */
  keep(name, box) {
    const ticked = { get: () => (box.checked ? "1" : ""), set: (value) => (box.checked = value === "1") };
    const written = { get: () => box.value, set: (value) => (box.value = value) };
    this.#kept.set(name, box.get ? box : box.type === "checkbox" ? ticked : written);
  }

  /** The text of this field goes to other panels and comes from them; `give` and `take` say in which form. */
  carries(box, { give = (text) => text, take = (text) => text } = {}) {
    this.#sentence = { box, give, take };
  }

  /** The address of the panel as it stands. */
  get address() {
    const values = Object.fromEntries([...this.#kept].map(([name, each]) => [name, each.get()]));
    if (this.models.length < 2) delete values.model;
    return this.#touched ? addressOf(this.id, values) : `#${this.id}`;
  }

  /** Someone changed something: ask again, keep it in the address, and take the sentence along. */
  changed(how) {
    this.#clearPassing();
    this.remember();
    if (this.#sentence) carry((this.#carried = this.#sentence.give(this.#sentence.box.value)));
    this.refresh(how);
  }

  /** Keep what is shown in the address. */
  remember() {
    this.#touched = true;
    writeAddress(this.address);
  }

  /** The panel comes into view: with what the address says, or with the sentence of the panel before. */
  arrive() {
    if (this.#restore()) return this.refresh({ now: true });
    const sentence = carriedSentence();
    if (!this.#sentence || sentence === null || sentence === this.#carried) return;
    this.#carried = sentence;
    this.#clearPassing();
    this.#sentence.box.value = this.#sentence.take(sentence, this.#sentence.box.value);
    this.refresh({ now: true });
  }

  /** The server's reply for a model, the chosen one if none is named. */
  ask(path, body, signal, model = this.model) {
    return ask(path, { ...body, model: model.name }, signal);
  }

  /**
   * Ask whenever a field or the model changes. `question()` gives the body, or a hint in its place where there
   * is nothing to ask yet; `show(reply, body, { place, model })` fills the place and returns what a screen
   * reader says, or a promise of it.
   */
  live(path, question, show, pause = 250) {
    const work = async (signal) => {
      const body = question();
      if (typeof body === "string") return this.hint(body);
      const answer = async () => {
        const found = await this.#answers(typeof path === "string" ? path : path(), body, signal);
        if (signal.aborted) return;
        const said = await Promise.all(found.map(({ reply, ...where }) => reply && show(reply, body, where)));
        if (!signal.aborted) this.spoken.textContent = said[0] ?? "";
      };
      await this.try(answer, () => this.#clear());
    };
    const again = latest(work, pause);
    this.refresh = (how) => {
      this.#notice();
      if (typeof question() !== "string") this.#reading();
      again(how);
    };
    this.inputs.addEventListener("input", () => this.changed());
    for (const each of [this.chooser, this.beside]) each.box.addEventListener("change", () => this.changed({ now: true }));
    this.#learnNotices();
    this.#restore();
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

  /** Do this beside what the panel answers; only an error of the server is shown. */
  async aside(work) {
    try {
      await work();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.#say(error.message, "note wrong");
    }
  }

  /** Say what is still wanted, and take the result away; what the panel shows without one takes its place. */
  hint(line) {
    this.#say(line, "note");
    this.result.removeAttribute("aria-busy");
    if (!this.idle?.()) this.result.replaceChildren();
    this.spoken.textContent = "";
  }

  /** The replies of the chosen model and of the one beside it, each with the place to show it in. */
  async #answers(path, body, signal) {
    const second = this.models.find(({ name }) => name === this.beside.box.value);
    const replies = [this.ask(path, body, signal), ...(second ? [this.#besides(path, body, signal, second)] : [])];
    const [first, other] = await Promise.all(replies);
    if (signal.aborted) return [];
    if (!second) return [{ reply: first, place: this.result, model: this.model }];
    const columns = [this.model, second].map((model) => ({ model, place: make("div", { class: "of-model" }) }));
    const named = columns.map(({ model, place }) => make("section", {}, make("h3", {}, model.name), place));
    this.result.replaceChildren(make("div", { class: "beside" }, ...named));
    if (other instanceof ApiError) columns[1].place.append(make("p", { class: "note wrong" }, other.message));
    return columns.map((column, number) => ({ ...column, reply: [first, other instanceof ApiError ? null : other][number] }));
  }

  /** The reply of the second model; what it cannot do is said in its own place. */
  async #besides(path, body, signal, model) {
    try {
      return await this.ask(path, body, signal, model);
    } catch (error) {
      if (error instanceof ApiError) return error;
      throw error;
    }
  }

  /** Set what the address keeps for this panel; whether there was something. */
  #restore() {
    const { panel, values } = readAddress();
    if (panel !== this.id || !values.size || this.address === location.hash) return false;
    this.#clearPassing();
    for (const [name, each] of this.#kept) if (values.has(name)) each.set(values.get(name));
    this.#touched = true;
    if (this.#sentence) carry((this.#carried = this.#sentence.give(this.#sentence.box.value)));
    return true;
  }

  #clearPassing() {
    for (const each of this.#kept.values()) each.clear?.();
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

  get #fields() {
    return [...this.inputs.querySelectorAll("textarea, input:not([type=checkbox])")];
  }

  /** The texts of all fields as one. */
  get #texts() {
    return JSON.stringify(this.#fields.map(({ value }) => value));
  }

  /** Learn what each example writes into the fields, and leave them as they are. */
  #learnNotices() {
    const before = this.#fields.map(({ value }) => value);
    for (const { set, notice } of this.#examples) {
      set();
      this.#notices.set(this.#texts, notice);
    }
    this.#fields.forEach((box, place) => (box.value = before[place]));
  }

  /** Say what to notice while the fields hold an example, however it came there: also by a link. */
  #notice() {
    const line = this.#notices.get(this.#texts);
    this.notice.hidden = !line;
    this.notice.replaceChildren(make("b", {}, "What to notice "), line ?? "");
  }

  #chooser(label, options) {
    const chooser = choice(label, options, { class: "model" });
    chooser.root.hidden = this.models.length < 2;
    return chooser;
  }
}

/** A button that copies the address, for someone else to open the same. */
function linkButton() {
  const button = make("button", { type: "button", class: "quiet" }, "Copy link");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copy it from the address bar"; // the clipboard is closed to pages that are not on https
    }
  });
  return button;
}
