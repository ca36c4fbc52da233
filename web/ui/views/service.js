// A service port's page. What is on the stream (the row, events) is shown as it
// arrives; the rest (details, connections, a trace of the kernel's rules) is asked
// for every two seconds, only while the page is shown and its tab visible.

import { byId, h, icon, setAttr, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import * as pathOf from "../lib/path.js";
import * as route from "../lib/route.js";
import { sentence, why } from "../lib/words.js";
import { get } from "../state/api.js";
import { Charts } from "./charts.js";
import * as clients from "./clients.js";
import * as connections from "./connections.js";
import { Diagram } from "./diagram.js";
import * as endpoints from "./endpoints.js";
import { explain } from "./explain.js";
import { pill, scroller, stateMark } from "./parts.js";
import * as rules from "./rules.js";
import { Timeline } from "./timeline.js";
import { Tracer } from "./tracer.js";

const every = 2_000;

const none = { ended: [], refused: [], talks: [], others: 0, connects: [] };

// ease is how many times as long as a trace took the next one waits: reading the
// rules of thousands of services takes the node a second of CPU time. Longest
// bounds the wait, in milliseconds.
const ease = 10, longest = 30_000;

export class ServicePage {
  #store;
  #history;
  #page = byId("page-service");
  #key = "";
  #shown = false;
  #timer = 0;
  #abort = null;
  #answers = { service: null, trace: null, connections: [], clients: none };
  #traced = { what: "", again: 0 }; // the last trace, and when it may be made anew
  #stood = ""; // where the service was at the last look
  #past = []; // this service's events from before the stream
  #said = new Map();
  #pill = pill();
  #state = stateMark();
  #title = h("h1");
  #address = h("p", { class: "mono dim service-addresses" });
  #reason = h("span");
  #known = []; // what of the heading is only there for a service that there is
  #countdown = h("b", { class: "countdown number" });
  #troubles = h("div", { class: "findings" });
  #charts = new Charts();
  #tracer = new Tracer(() => this.#choose());
  #story = h("ol", { class: "story" });
  #findings = h("div");
  #steps = h("div", { class: "steps" });
  #rules = h("details", { class: "real-rules" }, h("summary", { text: "Show the real rules" }), h("p", { class: "dim small", text: "Read back from the kernel just now, as its own tools print them. Counters count packets since the rule was written; of a connection, the nat table sees only the first one." }), this.#steps);
  #explain = h("div");
  #explained = h("h2", { id: "explain-name", text: "What is this?" });
  #endpoints = scroller("Endpoints");
  #connections = scroller("Connections");
  #talks = scroller("Who talks to whom");
  #refused = scroller("Refused and dropped");
  #turnedAway;
  #count = h("span", { class: "dim small number" });
  #timeline = new Timeline({ most: 100, named: false });
  #quiet = h("p", { class: "dim small", text: "Nothing has happened to it since kproxy began to keep events." });
  #body;
  #gone = h("div", { class: "empty", hidden: true });
  #diagram;

  constructor(store, history) {
    this.#store = store;
    this.#history = history;
    const panel = (cls, heading, ...rest) => h("section", { class: `panel ${cls}` }, h("header", null, heading), ...rest);
    const drawing = h("div", { class: "drawing" });
    const reason = h("p", { class: "service-reason" }, this.#reason, " ", this.#countdown);
    this.#known = [this.#pill.el, this.#state.el, this.#address, reason];
    const head = h("header", { class: "service-head" },
      h("a", { class: "back", href: "#/" }, icon("i-back"), "All services"),
      h("div", { class: "service-title" }, this.#title, this.#pill.el, this.#state.el),
      this.#address, reason);
    this.#body = h("div", { class: "service-body" }, this.#troubles, this.#charts.el,
      panel("p-path", [h("h2", { text: "The way of a connection" }), h("span", { class: "end" }, this.#tracer.el)], this.#tracer.command, h("div", { class: "path-grid" }, drawing, h("div", { class: "path-words" }, this.#findings, this.#story)), this.#rules),
      h("div", { class: "service-grid" },
        panel("p-endpoints", h("h2", { text: "Endpoints" }), this.#endpoints),
        panel("p-timeline", h("h2", { text: "What happened" }), this.#quiet, scroller("What happened", this.#timeline.el)),
        panel("p-talks", h("h2", { text: "Who talks to whom" }), this.#talks),
        (this.#turnedAway = panel("p-refused", h("h2", { text: "Refused and dropped" }), this.#refused)),
        panel("p-connections", [h("h2", { text: "Connections" }), this.#count], this.#connections),
        panel("p-explain", this.#explained, this.#explain)));
    this.#page.append(head, this.#gone, this.#body);
    this.#diagram = new Diagram(drawing);
    this.#rules.addEventListener("toggle", () => this.#update());
    store.subscribe((changed) => {
      if (this.#shown && (changed.has("rows") || changed.has("tick") || changed.has("timeline"))) this.#update();
    });
    document.addEventListener("visibilitychange", () => {
      if (this.#shown && !document.hidden) this.#ask();
    });
  }

  enter({ key, query }) {
    this.#key = key;
    this.#shown = true;
    this.#answers = { service: null, trace: null, connections: [], clients: none };
    this.#past = [];
    this.#traced = { what: "", again: 0 };
    this.#stood = "";
    this.#said.clear();
    for (const el of [this.#endpoints, this.#connections, this.#talks, this.#refused, this.#steps, this.#findings]) el.replaceChildren();
    this.#rules.open = false;
    this.#page.hidden = false;
    const [namespace, rest] = route.split(key);
    this.#title.replaceChildren(h("span", { class: "dim", text: namespace + "/" }), rest);
    this.#tracer.begin(query);
    this.#update();
    this.#ask();
    this.#older();
  }

  leave() {
    this.#shown = false;
    this.#page.hidden = true;
    clearTimeout(this.#timer);
    this.#abort?.abort();
  }

  #choose() {
    history.replaceState(null, "", route.withQuery(route.service(this.#key), this.#tracer.query()));
    this.#ask();
  }

  // ask fetches what the stream doesn't carry, and again after a while.
  async #ask() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    const abort = (this.#abort = new AbortController());
    const key = this.#key;
    const row = this.#store.row(key);
    if (row && !document.hidden) {
      const [service, open, seen] = await Promise.allSettled([get("/api/v1/service", { key }, abort.signal), get("/api/v1/connections", { service: key }, abort.signal), get("/api/v1/clients", { service: key }, abort.signal)]);
      if (abort.signal.aborted || key !== this.#key) return;
      if (service.status === "fulfilled") this.#answers.service = service.value;
      if (open.status === "fulfilled") this.#answers.connections = open.value.connections ?? [];
      if (seen.status === "fulfilled") this.#answers.clients = seen.value;
      const { ended, refused } = this.#answers.clients;
      this.#tracer.offer(row, [...this.#answers.connections, ...ended, ...refused]);
      await this.#trace(row, abort.signal);
      if (abort.signal.aborted || key !== this.#key) return;
      this.#update();
    }
    this.#timer = setTimeout(() => this.#ask(), row ? every : 500);
  }

  async #trace(row, signal) {
    const request = this.#tracer.request(row.protocol);
    if (!request) return;
    if (row.protocol === "SCTP") return this.#tracer.fail("SCTP can’t be traced; the picture shows what kproxy intends.");
    const what = JSON.stringify(request), began = performance.now();
    if (what === this.#traced.what && began < this.#traced.again) return;
    const done = () => {
      const now = performance.now();
      this.#traced = { what, again: now + Math.min(ease * (now - began), longest) };
    };
    try {
      this.#answers.trace = await get("/api/v1/trace", request, signal);
      done();
      this.#tracer.fail("");
    } catch (e) {
      if (e.name === "AbortError") return;
      done();
      this.#answers.trace = null;
      this.#tracer.fail(e.status === 404 ? "This kproxy can’t trace; the picture shows what it intends." : `Not traced: ${e.message}. The picture shows what kproxy intends.`);
    }
  }

  async #older() {
    const key = this.#key;
    try {
      const { events } = await get("/api/v1/timeline", { service: key, limit: 100 });
      if (key === this.#key) this.#past = events ?? [];
    } catch {
      // The events of the stream are shown in any case.
    }
    if (this.#shown) this.#update();
  }

  #update() {
    const row = this.#store.row(this.#key);
    const now = this.#store.now();
    byId("starting").hidden = this.#store.loaded;
    this.#page.classList.toggle("waiting", !this.#store.loaded);
    this.#gone.hidden = Boolean(row) || !this.#store.loaded;
    this.#body.hidden = !row;
    for (const el of this.#known) el.hidden = !row;
    if (!row) {
      this.#once("gone", this.#key, () => this.#gone.replaceChildren(h("b", { text: `There is no service port ${this.#key}.` }), h("p", { text: "It was deleted, or renamed. It comes back here by itself when it exists again." }), h("a", { href: "#/", text: "All services" })));
      return;
    }
    this.#retrace(row);
    this.#head(row, now);
    this.#charts.show(this.#history.track(this.#key), this.#store.meta.intervalSeconds);
    const path = pathOf.build({ row, trace: this.#answers.trace, service: this.#answers.service, talks: this.#answers.clients.talks, alive: this.#store.meta.alive });
    this.#diagram.show(path);
    this.#words(path);
    this.#tables(path, now);
    this.#events(now);
  }

  // retrace drops a trace from before the service moved, and asks for a new one.
  #retrace(row) {
    const stands = `${row.dataplane} ${row.state}`;
    const moved = this.#stood !== "" && stands !== this.#stood;
    this.#stood = stands;
    if (!moved || this.#answers.trace?.dataplane === row.dataplane) return;
    this.#answers.trace = null;
    this.#traced.again = 0;
    this.#ask();
  }

  #head(row, now) {
    this.#pill.show(row.dataplane);
    this.#state.show(row.state);
    setText(this.#address, [...row.addresses, row.nodePort ? `node port ${row.nodePort}` : "", row.protocol, row.algorithm.replaceAll("-", " ")].filter(Boolean).join("  ·  "));
    setText(this.#reason, `Why there: ${why(row)}`);
    const left = format.countdown(row.qualifiesAt, now);
    setText(this.#countdown, left && row.dataplane === "userspace" ? `Moves to the kernel in ${left}, if nothing changes.` : "");
    const troubles = [row.degraded, ...(row.problems ?? [])].filter(Boolean);
    this.#once("troubles", troubles, (list) => this.#troubles.replaceChildren(...list.map((t) => h("p", { class: "callout warn" }, icon("i-warn"), h("span", { text: sentence(t) })))));
  }

  #words(path) {
    this.#once("story", pathOf.story(path), (list) => this.#story.replaceChildren(...list.map((x) => h("li", { class: x.kind, text: x.text }))));
    const shown = path.taken === "kernel" ? path.beneath : path.taken;
    this.#once("explain", shown, () => {
      this.#explain.replaceChildren(explain(shown));
    });
    const { trace } = this.#answers;
    this.#once("findings", trace && [trace.findings, trace.mismatches, trace.culprit], () => this.#findings.replaceChildren(...[trace && rules.findings(trace)].filter(Boolean)));
    setAttr(this.#rules, "data-none", !trace);
    if (this.#rules.open) this.#once("rules", trace?.steps ?? null, () => this.#steps.replaceChildren(trace ? rules.steps(trace) : h("p", { class: "dim", text: "They haven’t been read yet." })));
  }

  #tables(path, now) {
    const { service, connections: open, clients: seen } = this.#answers;
    // Strips move on: draw them anew every few seconds at least.
    if (service) this.#once("endpoints", [service.service.endpoints, service.health, path.all.map((e) => e.probability), seen.connects, Math.floor(now / 5000)], () => this.#endpoints.replaceChildren(endpoints.table(service, path, seen.connects, now)));
    this.#once("connections", [open, seen.ended, Math.floor(now / 5000)], () => {
      this.#connections.replaceChildren(connections.table(open, seen.ended, now));
      setText(this.#count, `${format.exact(open.length)} open`);
    });
    if (!this.#talks.contains(document.activeElement)) this.#once("talks", [seen.talks, seen.others], () => this.#talks.replaceChildren(clients.talks(seen, (client) => this.#tracer.choose(client))));
    this.#turnedAway.hidden = seen.refused.length === 0;
    this.#once("refused", seen.refused, (list) => this.#refused.replaceChildren(clients.refused(list, now, false)));
  }

  #events(now) {
    const live = this.#store.events.filter((e) => e.service === this.#key);
    const seen = new Set(live.map((e) => e.time + e.message));
    const all = [...live, ...this.#past.filter((e) => !seen.has(e.time + e.message))];
    this.#quiet.hidden = all.length > 0;
    this.#timeline.show(all, now);
  }

  // once calls draw only when the value differs from what was drawn before.
  #once(name, value, draw) {
    const text = JSON.stringify(value);
    if (this.#said.get(name) === text) return;
    this.#said.set(name, text);
    draw(value);
  }
}
