// The tables of a report, as its text file has them.

import { make } from "./elements.js";

/** A section for each table: title, rows, and what is to be known of them. */
export function reportTables(tables) {
  return tables.map(({ title: own, columns, rows, notes }, number) => {
    const title = number === 0 ? "In numbers" : own; // the title of the first is that of the page
    const cells = (kind, values) => values.map((value) => make(kind, {}, value));
    const head = make("tr", {}, ...columns.map((name) => make(name ? "th" : "td", name ? { scope: "col" } : {}, name)));
    const body = rows.map(([name, ...rest]) => make("tr", {}, make("th", { scope: "row" }, name), ...cells("td", rest)));
    const table = make("table", { class: "report" }, make("thead", {}, head), make("tbody", {}, ...body));
    const said = notes.map((note) => make("p", { class: "note" }, note));
    const heading = make("h2", { class: "section" }, title);
    return make("section", { class: "card" }, heading, scrolling(table, title), ...said);
  });
}

/** What can be wider than a phone; whatever scrolls must be reachable by keyboard. */
export function scrolling(element, name) {
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": name }, element);
}
