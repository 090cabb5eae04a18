// Asking while someone types: only the last question matters.

/**
 * A function that waits until calls stop for a moment, then works; a newer call ends the work of older ones.
 * The work is given a signal that tells whether its answer is still wanted.
 */
export function latest(work, pause = 250) {
  let timer = 0;
  let running = new AbortController();
  return function again({ now = false } = {}) {
    clearTimeout(timer);
    running.abort();
    const mine = (running = new AbortController());
    timer = setTimeout(() => work(mine.signal), now ? 0 : pause);
  };
}
