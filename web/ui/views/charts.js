// Charts of a service port's last minutes: a figure, its present value, and how it
// went, with the scale's end written out.

import { h, s, setAttr, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { area, ceiling, line, peak } from "../lib/spark.js";
import { slots } from "../state/history.js";

const width = 360, height = 72;

const charts = [
  { title: "Active connections", print: format.count, of: (t) => t.active },
  { title: "New connections per second", print: format.rate, of: (t) => t.connections },
  { title: "Bytes per second, both ways", print: (n) => `${format.bytes(n)}/s`, of: (t) => t.bytesIn.map((x, i) => x + t.bytesOut[i]) },
  { title: "Failed per second", print: format.rate, of: (t) => t.failed, tone: "bad" },
];

export class Charts {
  #charts = charts.map((c) => ({ ...c, ...chart(c) }));
  el = h("div", { class: "charts" }, this.#charts.map((c) => c.el));

  // show draws a track whose samples are interval seconds apart.
  show(track, interval) {
    const span = format.duration(slots * interval);
    for (const c of this.#charts) {
      const values = c.of(track);
      const top = peak(values);
      const box = { width, height, slots, max: ceiling(top), pad: 2 };
      c.over.setAttribute("d", top > 0 ? line(values, box) : ""); // a line along the edge says nothing
      c.under.setAttribute("d", top > 0 ? area(values, box) : "");
      setText(c.value, c.print(values.at(-1) ?? 0));
      setText(c.scale, top > 0 ? c.print(box.max) : "");
      setText(c.begin, `${span} ago`);
      setAttr(c.svg, "aria-label", `${c.title}, last ${span}: now ${c.print(values.at(-1) ?? 0)}, at most ${c.print(top)}`);
      setAttr(c.el, "data-tone", c.tone && top > 0 ? c.tone : null);
    }
  }
}

function chart({ title }) {
  const under = s("path", { class: "under" }), over = s("path", { class: "over" });
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" }, s("path", { class: "grid", d: `M0 .5H${width}M0 ${height - 0.5}H${width}` }), under, over);
  const value = h("span", { class: "big number" }), scale = h("span", { class: "scale-end number dim", "aria-hidden": "true" }), begin = h("span");
  return { under, over, svg, value, scale, begin, el: h("figure", { class: "panel figure-panel" }, h("figcaption", { class: "small dim", text: title }), value, h("div", { class: "chart-box" }, scale, svg), h("p", { class: "axis dim", "aria-hidden": "true" }, begin, h("span", { text: "now" }))) };
}
