// The last minutes of figures, for the service ports that are looked at. kproxy keeps
// them, and is asked anew every few seconds, many services at a time.

import { recent } from "../lib/health.js";
import { get } from "./api.js";

// slots is how many samples kproxy keeps: five minutes at one every two seconds.
export const slots = 150;

// every is how many milliseconds an answer stays new, and kept how many one that is not
// looked at stays in memory.
const every = 4_000, kept = 60_000;

// batch is how many services one request asks for: addresses have a limit.
const batch = 40;

// none are the samples of a service port that kproxy hasn't told of yet.
const none = { active: [], connections: [], bytesIn: [], bytesOut: [], failed: [], retried: [] };

export class History {
  #store;
  #tracks = new Map(); // key → {samples, at: when kproxy was asked last}
  #due = []; // keys, for the next question
  #timer = 0;

  constructor(store) {
    this.#store = store;
  }

  // track returns {active: […], …} of a service port, oldest first. They come soon, and new
  // ones for as long as it is called every second.
  track(key) {
    const now = Date.now();
    let t = this.#tracks.get(key);
    if (!t) this.#tracks.set(key, (t = { samples: none, at: 0 }));
    if (Math.abs(now - t.at) >= every && this.#store.link.state === "live") { // the clock may be put back
      t.at = now;
      this.#due.push(key);
      this.#timer ||= setTimeout(() => this.#ask(), 150);
    }
    return t.samples;
  }

  // downs returns which endpoints of a service port were found down lately.
  downs(key) {
    return recent(this.#store.downs(key), this.#store.now());
  }

  async #ask() {
    const keys = this.#due.splice(0, batch), now = Date.now();
    this.#timer = this.#due.length > 0 ? setTimeout(() => this.#ask(), 60) : 0;
    for (const [key, t] of this.#tracks) if (now - t.at > kept) this.#tracks.delete(key);
    try {
      const { services } = await get("/api/v1/history", { service: keys });
      for (const [key, samples] of Object.entries(services)) {
        const t = this.#tracks.get(key);
        if (t) t.samples = samples;
      }
    } catch {
      // What was drawn stays; the header says that kproxy doesn't answer.
    }
  }
}
