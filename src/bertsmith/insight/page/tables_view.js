// A report of tables alone.

import { reportTables } from "./report_tables.js";

/** Fill the page. */
export function show(root, data) {
  root.append(...reportTables(data.tables));
  root.dataset.ready = "true";
}
