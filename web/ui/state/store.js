// What is known of the proxy now. One instance; only the stream writes, views
// read. Views hear of changes at most once per frame: subscribe's function is
// called with the set of what changed ("meta", "rows", "node", "timeline", "link",
// "tick").

import { byKey } from "../lib/filter.js";
import { downs } from "../lib/health.js";

// remembered is how many events are kept.
const remembered = 500;

export class Store {
  meta = { node: "", mode: "", version: "", alive: false, exhausted: [], notReady: "", drain: null, warnings: [], sync: null, sources: [], verdict: [], intervalSeconds: 1 };
  firstVersion = ""; // of the kproxy that this page came from
  // link is the stream's state: "connecting", "live", "waiting", "paused" (while
  // the page is hidden); until (ms) is when the next attempt is made; error says what went
  // wrong last.
  link = { state: "connecting", until: 0, error: "" };
  node = null;
  events = [];
  loaded = false; // an overview has arrived
  skew = 0; // the node's clock less this one, in milliseconds

  #rows = new Map();
  #sorted = null;
  #downs = null;
  #listeners = new Set();
  #changed = new Set();
  #scheduled = false;

  // now is the node's clock: countdowns go by it.
  now() {
    return Date.now() + this.skew;
  }

  get rows() {
    this.#sorted ??= [...this.#rows.values()].sort(byKey);
    return this.#sorted;
  }

  row(key) {
    return this.#rows.get(key);
  }

  // downs returns how often endpoints of a service port were found down:
  // Map address → {times, last}; undefined if none was.
  downs(key) {
    this.#downs ??= downs(this.events);
    return this.#downs.get(key);
  }

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  // overview replaces everything: what a lost stream missed is unknown.
  overview(o) {
    this.#rows = new Map((o.services ?? []).map((r) => [r.key, r]));
    this.#sorted = null;
    this.loaded = true;
    this.#stands(o);
    this.firstVersion ||= o.version;
    Object.assign(this.meta, { verdict: o.verdict ?? [], intervalSeconds: o.intervalSeconds || 1 });
    this.#heard(o.time);
    this.#touch("meta", "rows");
  }

  update(u) {
    for (const r of u.changed ?? []) {
      if (!this.#rows.has(r.key)) this.#sorted = null;
      this.#rows.set(r.key, r);
    }
    for (const key of u.removed ?? []) if (this.#rows.delete(key)) this.#sorted = null;
    // Sorted by key, which doesn't change: only replace what is in place.
    if (this.#sorted && u.changed?.length) this.#sorted = this.#sorted.map((r) => this.#rows.get(r.key));
    if (u.alive !== undefined && u.alive !== this.meta.alive) {
      this.meta.alive = u.alive;
      this.#touch("meta");
    }
    if (u.exhausted !== undefined && u.exhausted.join() !== this.meta.exhausted.join()) {
      this.meta.exhausted = u.exhausted;
      this.#touch("meta");
    }
    this.meta.verdict = u.verdict ?? this.meta.verdict;
    this.#heard(u.time);
    this.#touch("rows");
  }

  figures(n) {
    this.node = n;
    this.#stands(n);
    this.#touch("node", "meta");
  }

  event(e) {
    this.events = [e, ...this.events].slice(0, remembered);
    this.#downs = null;
    this.#touch("timeline");
  }

  // past sets the events from before the stream began, newest first.
  past(events) {
    const seen = new Set(this.events.map(identity));
    this.events = [...this.events, ...events.filter((e) => !seen.has(identity(e)))]
      .sort((a, b) => Date.parse(b.time) - Date.parse(a.time)).slice(0, remembered);
    this.#downs = null;
    this.#touch("timeline");
  }

  linked(state, { until = 0, error = "" } = {}) {
    this.link = { state, until, error };
    this.#touch("link");
  }

  tick() {
    this.#touch("tick");
  }

  // stands takes in how kproxy is.
  #stands(x) {
    for (const name of ["node", "mode", "version", "alive", "exhausted", "notReady", "drain", "warnings", "sync", "sources"]) if (x[name] !== undefined) this.meta[name] = x[name];
  }

  #heard(time) {
    const at = Date.parse(time);
    if (!Number.isNaN(at)) this.skew = at - Date.now();
  }

  #touch(...what) {
    for (const w of what) this.#changed.add(w);
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      const changed = this.#changed;
      this.#changed = new Set();
      for (const f of this.#listeners) f(changed);
    });
  }
}

function identity(e) {
  return `${e.time} ${e.service ?? ""} ${e.message}`;
}
