// The sentence that someone works with, carried from panel to panel.

let sentence = null;

/** The sentence that was last typed or chosen somewhere; null before that. */
export const carriedSentence = () => sentence;

/** Take this sentence to the other panels. */
export function carry(text) {
  sentence = text;
}
