// The curve: new, failed and retried connections of all services in the last minutes
// or hours, new ones by data plane, with marks where services moved or endpoints went down
// or came back. A slider under it reads the values out, by pointer, keyboard and screen reader.

import { h, s, setAttr, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { ceiling, line, peak } from "../lib/spark.js";
import * as words from "../lib/words.js";
import { get } from "../state/api.js";
import { scroller } from "./parts.js";
import { look } from "./timeline.js";

const width = 900, height = 110, pad = 2;

// every is how many milliseconds an answer stays new.
const every = 10_000;

const ranges = { 5: "5 min", 60: "1 h", 360: "6 h" };

// point returns what the step at index i of an answer says: its time (ms), new ones by
// data plane in order, and the sums of failed and retried ones. Pure.
export function point(curve, i) {
  const planes = words.planeOrder.filter((p) => curve.planes[p]);
  const sum = (what) => planes.reduce((n, p) => n + curve.planes[p][what][i], 0);
  return { time: Date.parse(curve.begin) + i * curve.stepSeconds * 1000, planes: planes.map((p) => [p, curve.planes[p].new[i]]), failed: sum("failed"), retried: sum("retried") };
}

// marks returns the events that are moves or changes of health, each with the
// index of its step. Pure.
export function marks(curve, points, events) {
  const begin = Date.parse(curve.begin), step = curve.stepSeconds * 1000;
  return events.filter((e) => e.move === "offload" || e.move === "recall" || e.kind === "health")
    .map((e) => ({ event: e, at: Math.floor((Date.parse(e.time) - begin) / step) })).filter((m) => m.at >= 0 && m.at < points);
}

export class CurvePanel {
  #store;
  #minutes = 60;
  #asked = 0;
  #curve = null;
  #points = [];
  #marks = [];
  #ranges = new Map();
  #plot = s("g");
  #cursor = s("path", { class: "cursor" });
  #svg = s("svg", { class: "chart curve", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { class: "grid", d: `M0 .5H${width}M0 ${height - 0.5}H${width}` }), this.#plot, this.#cursor);
  #slider = h("input", { type: "range", min: "0", max: "0", value: "0", class: "curve-slider", "aria-label": "Time in the curve" });
  #said = h("p", { class: "small number curve-said" });
  #scale = h("span", { class: "scale-end number dim", "aria-hidden": "true" });
  #begin = h("span");
  #end = h("span");
  #table = h("details", { class: "curve-table" }, h("summary", { class: "small", text: "As a table" }), scroller("Connections over time"));
  el;

  constructor(store) {
    this.#store = store;
    const buttons = Object.entries(ranges).map(([minutes, text]) => {
      const b = h("button", { type: "button", class: "tool", text, "aria-pressed": "false", on: { click: () => this.#choose(Number(minutes)) } });
      this.#ranges.set(Number(minutes), b);
      return b;
    });
    this.#slider.addEventListener("input", () => this.#read());
    this.#svg.addEventListener("pointermove", (e) => {
      const box = this.#svg.getBoundingClientRect();
      this.#slider.value = String(Math.round(((e.clientX - box.left) / box.width) * (this.#points.length - 1)));
      this.#read();
    });
    this.#table.addEventListener("toggle", () => this.#list());
    this.el = h("details", { class: "panel recent curve-panel" }, h("summary", null, h("h2", { text: "Connections over time" })),
      h("div", { class: "curve-tools", role: "group", "aria-label": "Range" }, buttons),
      h("div", { class: "chart-box" }, this.#scale, this.#svg), this.#slider,
      h("p", { class: "axis dim", "aria-hidden": "true" }, this.#begin, this.#end), this.#said, this.#table);
    this.el.addEventListener("toggle", () => this.tick(true));
  }

  #choose(minutes) {
    this.#minutes = minutes;
    this.tick(true);
  }

  // tick asks for the curve where it is seen, and not older than it may be.
  async tick(now = false) {
    for (const [minutes, b] of this.#ranges) setAttr(b, "aria-pressed", String(minutes === this.#minutes));
    if (!this.el.open || document.hidden || (!now && Date.now() - this.#asked < every)) return;
    this.#asked = Date.now();
    const minutes = this.#minutes;
    try {
      const curve = await get("/api/v1/curve", { minutes });
      if (minutes === this.#minutes) this.#show(curve);
    } catch {
      // The header says that kproxy doesn't answer; the curve stays as it was.
    }
  }

  #show(curve) {
    const before = this.#points.length, last = this.#slider.value === this.#slider.max;
    this.#curve = curve;
    const planes = words.planeOrder.filter((p) => curve.planes[p]), now = this.#store.now();
    const n = Math.round((this.#minutes * 60) / curve.stepSeconds);
    this.#points = Array.from({ length: n }, (_, i) => point(curve, i));
    this.#marks = marks(curve, n, this.#store.events);
    const lines = [...planes.map((p) => [curve.planes[p].new, { "data-plane": p }]), [this.#points.map((p) => p.failed), { "data-tone": "bad" }], [this.#points.map((p) => p.retried), { "data-tone": "warn" }]]
      .filter(([values]) => peak(values) > 0);
    const max = ceiling(Math.max(0, ...lines.map(([values]) => peak(values))));
    this.#plot.replaceChildren(
      ...this.#marks.map((m) => s("path", { class: "mark", "data-tone": look(m.event)[1] || null, d: `M${this.#x(m.at)} 0V${height}` })),
      ...lines.map(([values, look]) => s("path", { class: "over", ...look, d: line(values, { width, height, slots: n, max, pad }) })));
    setText(this.#scale, `${format.rate(max)}/s`);
    setText(this.#begin, format.clock(this.#points[0].time, now));
    setText(this.#end, format.clock(this.#points[n - 1].time + curve.stepSeconds * 1000, now)); // the step of now isn’t over
    setAttr(this.#slider, "max", String(n - 1));
    if (last || before !== n) this.#slider.value = String(n - 1);
    this.#read();
    this.#list();
  }

  #x(i) {
    return Math.round((i / Math.max(1, this.#points.length - 1)) * width * 10) / 10;
  }

  // read says what is at the slider.
  #read() {
    const i = Number(this.#slider.value), p = this.#points[i];
    if (!p) return;
    this.#cursor.setAttribute("d", `M${this.#x(i)} 0V${height}`);
    const happened = this.#marks.filter((m) => m.at === i).map((m) => `${m.event.service ?? ""}: ${m.event.message}`);
    const text = [format.clock(p.time, this.#store.now()), ...p.planes.map(([name, rate]) => `${words.plane(name).label} ${format.rate(rate)} new/s`), `${format.rate(p.failed)} failed/s`, `${format.rate(p.retried)} retried/s`, ...happened.slice(0, 3), happened.length > 3 ? `and ${happened.length - 3} more changes` : ""].filter(Boolean).join(" · ");
    setText(this.#said, text);
    setAttr(this.#slider, "aria-valuetext", text);
  }

  #list() {
    if (!this.#table.open || !this.#curve) return;
    const planes = this.#points[0]?.planes.map(([name]) => name) ?? [], now = this.#store.now();
    const head = (text) => h("th", { scope: "col", class: "end", text });
    const cell = (n) => h("td", { class: "end", text: format.rate(n) });
    this.#table.lastChild.replaceChildren(h("table", { class: "data" },
      h("thead", null, h("tr", null, h("th", { scope: "col", text: "From" }), planes.map((p) => head(`${words.plane(p).label}, new/s`)), head("Failed/s"), head("Retried/s"), h("th", { scope: "col", text: "Changes" }))),
      h("tbody", null, [...this.#points.entries()].reverse().map(([i, p]) => h("tr", null, h("th", { scope: "row", class: "number", text: format.clock(p.time, now) }), p.planes.map(([, n]) => cell(n)), cell(p.failed), cell(p.retried), h("td", { text: this.#marks.filter((m) => m.at === i).map((m) => `${m.event.service ?? ""}: ${m.event.message}`).join("; ") }))))));
  }
}
