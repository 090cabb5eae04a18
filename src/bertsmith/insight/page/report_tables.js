// The tables of a report, as its text file has them.

import { make } from "./elements.js";

/** A section for each table: title, rows, and what is to be known of them. */
export function reportTables(tables) {
  return tables.map(({ title: own, columns, rows, notes }, number) => {
    const title = number === 0 ? "In numbers" : own; // the title of the first is that of the page
    const cells = (kind, values) => values.map((value) => make(kind, {}, value));
    const head = make("tr", {}, ...columns.map((name) => make(name ? "th" : "td", name ? { scope: "col" } : {}, name)));
    const body = rows.map(([name, ...rest]) => make("tr", {}, make("th", { scope: "row" }, name), ...cells("td", rest)));
    // It can be wider than a phone, and what scrolls must be reachable by keyboard.
    const wide = { class: "wide", tabindex: 0, role: "region", "aria-label": title };
    const table = make("table", { class: "report" }, make("thead", {}, head), make("tbody", {}, ...body));
    const said = notes.map((note) => make("p", { class: "note" }, note));
    const heading = make("h2", { class: "section" }, title);
    return make("section", { class: "card" }, heading, make("div", wide, table), ...said);
  });
}
