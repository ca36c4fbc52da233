// The last minutes of figures, for the service ports that were looked at. What
// lies before the first look is fetched, many services at a time; what follows
// is taken from the live rows.

import { recent } from "../lib/health.js";
import { Ring } from "../lib/ring.js";
import { get } from "./api.js";

export const figures = ["active", "connections", "bytesIn", "bytesOut", "failed", "retried"];

// slots is how many samples are kept, as many as kproxy keeps: five minutes at one
// every two seconds.
export const slots = 150;

// batch is how many services one request asks for: addresses have a limit.
const batch = 40;

export class History {
  #store;
  #tracks = new Map();
  #missing = new Set();
  #timer = 0;
  #sampled = 0;

  constructor(store) {
    this.#store = store;
    store.subscribe((changed) => {
      if (changed.has("tick")) this.#sample();
    });
    // While a tab is hidden nothing is sampled; begin anew instead of showing a gap.
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.forget();
    });
  }

  // track returns {active: Ring, …} of a service port, which fill up soon.
  track(key) {
    let t = this.#tracks.get(key);
    if (!t) {
      t = Object.fromEntries(figures.map((f) => [f, new Ring(slots)]));
      this.#tracks.set(key, t);
      this.#missing.add(key);
      this.#timer ||= setTimeout(() => this.#fetch(), 150);
    }
    return t;
  }

  // downs returns which endpoints of a service port were found down lately.
  downs(key) {
    return recent(this.#store.downs(key), this.#store.now());
  }

  forget() {
    this.#tracks.clear();
    this.#missing.clear();
  }

  #sample() {
    const interval = this.#store.meta.intervalSeconds * 1000;
    const now = Date.now();
    if (this.#store.link.state !== "live" || now - this.#sampled < interval * 0.6) return;
    this.#sampled = now;
    for (const [key, t] of this.#tracks) {
      const r = this.#store.row(key);
      if (!r) {
        this.#tracks.delete(key);
        continue;
      }
      t.active.push(r.connections.active);
      for (const f of figures.slice(1)) t[f].push(r.rates[f]);
    }
  }

  async #fetch() {
    this.#timer = 0;
    const keys = [...this.#missing].slice(0, batch);
    for (const k of keys) this.#missing.delete(k);
    if (this.#missing.size > 0) this.#timer = setTimeout(() => this.#fetch(), 60);
    if (keys.length === 0) return;
    try {
      const { services } = await get("/api/v1/history", { service: keys });
      for (const [key, series] of Object.entries(services ?? {})) {
        const t = this.#tracks.get(key);
        if (t) for (const f of figures) t[f].prepend(series[f] ?? []);
      }
    } catch {
      // Sparklines begin now, then.
    }
  }
}
