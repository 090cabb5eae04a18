// The server counts Unicode code points, as Python does; JavaScript strings count UTF-16 units, of which an
// emoji takes two.

/** For each code point of a text and for its end, the UTF-16 index at which it starts. */
export function unitIndices(text) {
  const indices = [];
  let index = 0;
  for (const character of text) {
    indices.push(index);
    index += character.length;
  }
  indices.push(index);
  return indices;
}

/** The text from one code point to another. */
export function slice(text, start, end) {
  const units = unitIndices(text);
  return text.slice(units[start], units[end]);
}

/** The text, or its beginning where it would fill lines of its own. */
export function brief(text, most = 80) {
  return unitIndices(text).length - 1 > most ? `${slice(text, 0, most - 1)}…` : text;
}

/** The text with the part between two code points replaced. */
export function replace(text, start, end, by) {
  const units = unitIndices(text);
  return text.slice(0, units[start]) + by + text.slice(units[end]);
}

/** The text in pieces, each with the span that covers it or null; of spans that overlap the first is kept. */
export function pieces(text, spans) {
  const units = unitIndices(text);
  const found = [];
  let reached = 0;
  for (const span of [...spans].sort((one, other) => one.start - other.start)) {
    if (span.start < reached || span.end >= units.length) continue;
    if (span.start > reached) found.push({ text: text.slice(units[reached], units[span.start]), span: null });
    found.push({ text: text.slice(units[span.start], units[span.end]), span });
    reached = span.end;
  }
  if (reached < units.length - 1) found.push({ text: text.slice(units[reached]), span: null });
  return found;
}
