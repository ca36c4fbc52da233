// How long to wait before the nth attempt in a row to reach kproxy again: soon at
// first, since a restart takes a second, and never longer than a person would
// wait. Milliseconds; random is 0 to 1 and spreads many browsers.
export function backoff(attempt, random) {
  const base = Math.min(500 * 2 ** attempt, 10_000);
  return Math.round(base * (0.8 + 0.4 * random));
}
