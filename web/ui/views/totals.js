// One line on all services: how many service ports each data plane has, as buttons
// that filter the list, and what they carry now.

import { h, icon, setAttr, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import * as words from "../lib/words.js";

// sum adds rows up. Pure.
export function sum(rows) {
  const ports = Object.fromEntries(words.planeOrder.map((p) => [p, 0]));
  const all = { active: 0, rate: 0, bytes: 0, failed: 0, retried: 0, failing: 0 };
  for (const r of rows) {
    ports[Object.hasOwn(ports, r.dataplane) ? r.dataplane : "none"]++;
    all.active += r.connections.active;
    all.rate += r.rates.connections;
    all.bytes += r.rates.bytesIn + r.rates.bytesOut;
    all.failed += r.connections.failed;
    all.retried += r.connections.retried;
    all.failing += r.rates.failed;
  }
  return { ports, all };
}

export class Totals {
  #planes = new Map();
  #figures = {};

  // onPlane is called with a data plane's name when its button is pressed.
  constructor(onPlane) {
    for (const name of words.planeOrder) {
      const p = words.plane(name), ports = h("b", { class: "number" });
      this.#planes.set(name, { ports, el: h("button", { type: "button", class: "station", data: { plane: name }, "aria-pressed": "false", title: `Show only these: ${p.brief}`, on: { click: () => onPlane(name) } }, icon(p.icon), `${p.label} `, ports) });
    }
    const figure = (id, label) => h("div", null, h("dt", { text: label }), (this.#figures[id] = h("dd", { class: "number" })));
    this.el = h("section", { class: "totals", "aria-label": "All services by data plane" },
      h("div", { class: "stations" }, [...this.#planes.values()].map((p) => p.el)),
      h("dl", { class: "sums" }, figure("active", "active"), figure("rate", "new/s"), figure("bytes", "throughput"), figure("failed", "failed"), figure("retried", "retried")));
  }

  // show brings the figures up to date; plane is the one that the list shows only.
  show(rows, plane) {
    const { ports, all } = sum(rows);
    for (const [name, p] of this.#planes) {
      setText(p.ports, format.exact(ports[name]));
      setAttr(p.el, "aria-pressed", String(plane === name));
      p.el.hidden = ports[name] === 0 && plane !== name;
    }
    const f = this.#figures;
    setText(f.active, format.count(all.active));
    setText(f.rate, format.rate(all.rate));
    setText(f.bytes, `${format.bytes(all.bytes)}/s`);
    setText(f.failed, format.count(all.failed) + (all.failing > 0 ? ` (${format.rate(all.failing)}/s now)` : ""));
    setAttr(f.failed, "data-tone", all.failing > 0 ? "bad" : null);
    setText(f.retried, format.count(all.retried));
  }
}
