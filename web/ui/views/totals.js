// The picture at the top: how many service ports, connections and bytes each data
// plane has now, userspace on one side and the kernel on the other. Each station is
// a button that filters the list.

import { h, icon, setAttr, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import * as words from "../lib/words.js";

// sum adds rows up by data plane. Pure.
export function sum(rows) {
  const out = Object.fromEntries(words.planeOrder.map((p) => [p, { ports: 0, active: 0, rate: 0, bytes: 0 }]));
  const all = { ports: rows.length, active: 0, rate: 0, bytes: 0, failed: 0, retried: 0, failing: 0, attention: 0 };
  for (const r of rows) {
    const bytes = r.rates.bytesIn + r.rates.bytesOut;
    for (const t of [all, out[r.dataplane] ?? out.none]) {
      t.active += r.connections.active;
      t.rate += r.rates.connections;
      t.bytes += bytes;
    }
    (out[r.dataplane] ?? out.none).ports++;
    all.failed += r.connections.failed;
    all.retried += r.connections.retried;
    all.failing += r.rates.failed;
  }
  return { planes: out, all };
}

export class Totals {
  #stations = new Map();
  #share = h("div", { class: "share", "aria-hidden": "true" });
  #segments = new Map();
  #figures = {};

  // onPlane is called with a data plane's name when its station is pressed.
  constructor(onPlane) {
    for (const name of words.planeOrder) {
      this.#stations.set(name, this.#station(name, onPlane));
      const segment = h("span", { data: { plane: name } });
      this.#segments.set(name, segment);
      this.#share.append(segment);
    }
    const get = (name) => this.#stations.get(name).el;
    const figure = (id, label) => {
      const value = h("dd", { class: "number" });
      this.#figures[id] = value;
      return h("div", null, h("dt", { text: label }), value);
    };
    this.el = h("section", { class: "totals", "aria-label": "All services by data plane" },
      h("div", { class: "stations" },
        h("div", { class: "zone" }, h("p", { class: "zone-name", text: "kproxy (a process)" }), get("userspace")),
        h("div", { class: "bridge", "aria-hidden": "true" }, h("span", null, "offload", icon("i-swap"), "recall")),
        h("div", { class: "zone kernel" }, h("p", { class: "zone-name", text: "Linux kernel" }), h("div", { class: "pair" }, words.kernelPlanes.map(get))),
        h("div", { class: "zone rest" }, h("p", { class: "zone-name", text: "no data plane" }), get("none"))),
      this.#share,
      h("dl", { class: "sums" }, figure("ports", "Service ports"), figure("active", "Active connections"), figure("rate", "New per second"), figure("bytes", "Throughput"), figure("failed", "Failed"), figure("retried", "Retried and saved")));
  }

  // show brings the figures up to date. capabilities are the node's, or none yet;
  // plane is the one that the list shows only.
  show(rows, plane, capabilities = []) {
    const { planes, all } = sum(rows);
    for (const [name, st] of this.#stations) {
      const t = planes[name];
      setText(st.ports, format.exact(t.ports));
      setText(st.unit, t.ports === 1 ? "service port" : "service ports");
      setText(st.flow, name === "none" || t.ports === 0 ? "" : `${format.count(t.active)} active · ${format.rate(t.rate)} new/s · ${format.bytes(t.bytes)}/s`);
      const missing = t.ports === 0 ? capabilities.find((c) => c.name === name && !c.supported) : null;
      setText(st.brief, missing ? `not on this node: ${missing.reason}` : words.plane(name).brief);
      setAttr(st.el, "aria-pressed", String(plane === name));
      setAttr(st.el, "data-idle", t.ports === 0);
      this.#segments.get(name).style.flexGrow = String(t.ports);
      this.#segments.get(name).hidden = t.ports === 0;
    }
    const f = this.#figures;
    setText(f.ports, format.exact(all.ports));
    setText(f.active, format.count(all.active));
    setText(f.rate, format.rate(all.rate));
    setText(f.bytes, `${format.bytes(all.bytes)}/s`);
    setText(f.failed, format.count(all.failed) + (all.failing > 0 ? ` (${format.rate(all.failing)}/s now)` : ""));
    setAttr(f.failed, "data-tone", all.failing > 0 ? "bad" : null);
    setText(f.retried, format.count(all.retried));
  }

  #station(name, onPlane) {
    const p = words.plane(name);
    const parts = { ports: h("span", { class: "big number" }), unit: h("span", { class: "dim small" }), flow: h("span", { class: "flow number" }), brief: h("span", { class: "brief" }) };
    const el = h("button", { type: "button", class: "station", data: { plane: name }, "aria-pressed": "false", title: `Show only these: ${p.label}`, on: { click: () => onPlane(name) } },
      h("span", { class: "station-name" }, icon(p.icon), p.label, p.generation ? h("span", { class: "generation", text: p.generation }) : null),
      h("span", { class: "station-count" }, parts.ports, " ", parts.unit),
      parts.flow, parts.brief);
    return { el, ...parts };
  }
}
