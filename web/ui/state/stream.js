// The live stream: one EventSource, opened again after it was lost. EventSource
// would reconnect by itself, but not after an error status (503 while kproxy
// starts), and it doesn't tell when; so every attempt is made here. A hidden page
// closes it: browsers open six connections to a host at a time, so that
// the seventh page in a row of tabs would wait for ever.

import { backoff } from "../lib/backoff.js";
import { get } from "./api.js";

// silence is after how many milliseconds without any message kproxy is asked
// whether it is there: a suspended laptop or a dead node never closes the stream.
const silence = 15_000;

// patience is how many milliseconds an answer may take.
const patience = 5_000;

// rest is after how many milliseconds of being hidden a page closes its stream.
const rest = 60_000;

export class Stream {
  #store;
  #source = null;
  #attempt = 0;
  #timer = 0;
  #heard = 0;
  #pausing = 0;

  constructor(store) {
    this.#store = store;
  }

  // start opens the stream and keeps it open as long as the page lives.
  start() {
    setInterval(() => this.#watch(), 5_000);
    addEventListener("online", () => this.retry());
    document.addEventListener("visibilitychange", () => this.#seen());
    this.#seen();
    this.#open();
  }

  // retry doesn't wait any longer for the next attempt.
  retry() {
    if (this.#store.link.state !== "waiting") return;
    clearTimeout(this.#timer);
    this.#open();
  }

  // seen pauses a while after the page was hidden, and goes on when it is shown.
  #seen() {
    clearTimeout(this.#pausing);
    if (document.hidden) this.#pausing = setTimeout(() => this.#pause(), rest);
    else if (this.#store.link.state === "paused") this.#open();
    else this.retry();
  }

  #pause() {
    this.#source?.close();
    this.#source = null;
    clearTimeout(this.#timer);
    this.#store.linked("paused");
  }

  // open makes an attempt. After a pause that isn't worth a word unless it fails.
  #open() {
    if (this.#store.link.state !== "paused") this.#store.linked("connecting", { error: this.#store.link.error });
    const source = new EventSource("/api/v1/live");
    this.#source = source;
    this.#heard = Date.now();
    const on = (name, take) => source.addEventListener(name, (e) => {
      if (source !== this.#source) return;
      this.#heard = Date.now();
      take(JSON.parse(e.data));
    });
    on("overview", (o) => {
      this.#attempt = 0;
      this.#store.overview(o);
      this.#store.linked("live");
      // What is asked for beside the stream waits until the services are shown.
      setTimeout(() => this.#past(), 300);
    });
    on("rows", (u) => this.#store.update(u));
    on("timeline", (e) => this.#store.event(e));
    on("node", (n) => this.#store.figures(n));
    source.addEventListener("error", () => {
      if (source === this.#source) this.#lost();
    });
  }

  async #lost() {
    this.#source?.close();
    this.#source = null;
    const wait = backoff(this.#attempt++, Math.random());
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#open(), wait);
    this.#store.linked("waiting", { until: Date.now() + wait, error: this.#store.link.error });
    const error = await this.#why();
    if (this.#store.link.state === "waiting") this.#store.linked("waiting", { until: this.#store.link.until, error });
  }

  // why asks for the reason, which an EventSource keeps for itself.
  async #why() {
    try {
      await get("/api/v1/node", {}, AbortSignal.timeout(patience));
      return "the connection to it was lost";
    } catch (e) {
      return e.message;
    }
  }

  async #watch() {
    const source = this.#source;
    if (!source || Date.now() - this.#heard < silence) return;
    if (this.#store.link.state !== "live") return this.#lost(); // no answer at all
    try {
      await get("/api/v1/node", {}, AbortSignal.timeout(patience));
      this.#heard = Date.now(); // nothing happens, which isn't a fault
    } catch {
      if (source === this.#source) this.#lost();
    }
  }

  async #past() {
    try {
      const { events } = await get("/api/v1/timeline", { limit: 500 });
      this.#store.past(events ?? []);
    } catch {
      // The events from now on come with the stream; the page works without the old.
    }
  }
}
