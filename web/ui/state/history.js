// The last minutes of figures, for the service ports that were looked at. What
// lies before the first look is fetched, many services at a time; what follows
// is taken from the live rows. What was missed meanwhile, because the stream was
// lost or this machine slept, is a gap, until kproxy has sent what was in it.

import { recent } from "../lib/health.js";
import { Ring } from "../lib/ring.js";
import { get } from "./api.js";

export const figures = ["active", "connections", "bytesIn", "bytesOut", "failed", "retried"];

// slots is how many samples are kept, as many as kproxy keeps: five minutes at one
// every two seconds.
export const slots = 150;

// slack is how much of an interval a sample may come early, or a tick late.
const slack = 0.4;

// batch is how many services one request asks for: addresses have a limit.
const batch = 40;

export class History {
  #store;
  #tracks = new Map();
  #missing = new Set(); // asked for at the next fetch
  #gaps = new Set(); // keys whose tracks have a gap that kproxy wasn't asked about
  #timer = 0;
  #sampled = 0; // when the last sample was due
  #lost = false; // the stream was, since then

  constructor(store) {
    this.#store = store;
    store.subscribe((changed) => {
      if (changed.has("link") && store.link.state !== "live") this.#lost = true;
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
      this.#ask(key);
    } else if (this.#gaps.delete(key)) {
      this.#ask(key);
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
    this.#gaps.clear();
    this.#sampled = 0;
  }

  #ask(key) {
    this.#missing.add(key);
    this.#timer ||= setTimeout(() => this.#fetch(), 150);
  }

  #sample() {
    if (this.#store.link.state !== "live") return;
    const due = this.#due();
    if (due === 0) return;
    // One tick that came late isn't a gap: what is known now was so then, or nearly.
    const gap = this.#lost || due > 2 ? NaN : undefined;
    this.#lost = false;
    for (const [key, t] of this.#tracks) {
      const r = this.#store.row(key);
      if (!r) {
        this.#tracks.delete(key);
        continue;
      }
      for (const f of figures) {
        const sample = f === "active" ? r.connections.active : r.rates[f];
        for (let i = 1; i < due; i++) t[f].push(gap ?? sample);
        t[f].push(sample);
      }
      if (gap !== undefined && due > 1) this.#gaps.add(key);
    }
  }

  // due returns how many samples are due, of which at least one is now: more than one
  // if some were missed.
  #due() {
    const interval = this.#store.meta.intervalSeconds * 1000;
    const now = Date.now();
    // The first one; or the clock was put back.
    if (this.#sampled === 0 || now < this.#sampled - interval) this.#sampled = now - interval;
    const due = Math.max(0, Math.floor((now - this.#sampled) / interval + slack));
    // On time: times of samples are whole intervals apart, whenever ticks come.
    this.#sampled = due > slots ? now : this.#sampled + due * interval;
    return Math.min(due, slots);
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
        if (t) for (const f of figures) t[f].fill(series[f] ?? []);
      }
    } catch {
      // Sparklines begin now, then.
    }
  }
}
