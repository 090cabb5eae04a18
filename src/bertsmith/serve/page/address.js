// What a panel shows, kept in the part of the address behind #, which is never sent to the server: a link to it
// opens the same panel with the same text.

const LONGEST = 6000; // characters; mail and chat programs cut longer links

/** The panel that the address names, and the values that it keeps for it. */
export function readAddress() {
  const [panel, rest = ""] = location.hash.slice(1).split(/\?(.*)/s);
  return { panel, values: new URLSearchParams(rest) };
}

/** The part of the address for a panel with these values; without those that would make it too long. */
export function addressOf(panel, values) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "")).toString();
  return query && query.length <= LONGEST ? `#${panel}?${query}` : `#${panel}`;
}

/** Put it into the address, without a step in the browser's history for every letter. */
export function writeAddress(address) {
  history.replaceState(null, "", address);
}
