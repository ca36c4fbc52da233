// What is remembered of endpoints' health, from the events of the timeline. Pure.

// lately is how many milliseconds a failure stays worth a mark.
export const lately = 15 * 60_000;

// downs returns, by service port and then by endpoint, how many times each was
// found down: Map key → Map address → {times, last} with last in milliseconds.
// Events may be in any order.
export function downs(events) {
  const out = new Map();
  for (const e of events) {
    if (e.kind !== "health" || !e.service) continue;
    const m = /^(\S+) is down\b/.exec(e.message);
    if (!m) continue;
    const of = out.get(e.service) ?? new Map();
    out.set(e.service, of);
    const was = of.get(m[1]) ?? { times: 0, last: 0 };
    of.set(m[1], { times: was.times + 1, last: Math.max(was.last, Date.parse(e.time)) });
  }
  return out;
}

// recent keeps of one service port's downs those that lie not further back than
// lately.
export function recent(of, now) {
  return new Map([...(of ?? [])].filter(([, d]) => now - d.last < lately));
}
