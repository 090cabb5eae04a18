// Tabs as in the ARIA practices: one stop for Tab, arrows between them, the choice kept in the address.

import { readAddress, writeAddress } from "./address.js";
import { make, walkable } from "./elements.js";

/**
 * Put up the tabs; each entry has id, title, group and badge. `fill(panel)` is called at its first showing, `arrive()`
 * at every later one, and `address()` gives its part of the address.
 */
export function putUpTabs(list, place, entries) {
  const shown = new Set();
  const made = entries.map((entry) => ({ entry, tab: tabOf(entry), panel: panelOf(entry) }));
  for (const group of new Set(entries.map((entry) => entry.group))) {
    const members = made.filter(({ entry }) => entry.group === group);
    list.append(make("span", { class: "group", role: "presentation" }, group), ...members.map(({ tab }) => tab));
  }
  place.append(...made.map(({ panel }) => panel));
  const reach = walkable(made.map(({ tab }) => tab));

  function show(wanted) {
    made.forEach((each, number) => {
      const chosen = each === wanted;
      each.tab.setAttribute("aria-selected", String(chosen));
      each.panel.hidden = !chosen;
      if (chosen) reach(number);
    });
    centre(wanted.tab, list.parentElement);
    document.title = `${wanted.entry.title} · bertsmith playground`;
    if (shown.has(wanted)) return wanted.entry.arrive?.();
    shown.add(wanted);
    wanted.entry.fill(wanted.panel);
  }
  const named = () => made.find(({ entry }) => entry.id === readAddress().panel);
  for (const each of made) {
    each.tab.addEventListener("focus", () => choose(each));
    each.tab.addEventListener("click", () => choose(each));
  }
  function choose(each) {
    if (each.tab.getAttribute("aria-selected") === "true") return;
    writeAddress(each.entry.address?.() ?? `#${each.entry.id}`);
    show(each);
  }
  addEventListener("hashchange", () => named() && show(named()));
  show(named() ?? made[0]);
}

/** Move the strip of tabs sideways; scrollIntoView would also move where the Tab key starts. */
function centre(tab, strip) {
  const [wanted, frame] = [tab, strip].map((each) => each.getBoundingClientRect());
  strip.scrollLeft += wanted.left + wanted.width / 2 - (frame.left + frame.width / 2);
}

function tabOf({ id, title, badge }) {
  const mark = badge ? make("span", { class: "badge" }, badge) : null;
  return make("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}` }, title, mark);
}

function panelOf({ id }) {
  const role = { role: "tabpanel", "aria-labelledby": `tab-${id}` };
  return make("section", { class: "panel", id: `panel-${id}`, ...role, hidden: true });
}
