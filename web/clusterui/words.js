// What classes and states are called, with the tone and icon that go with each.

import { h, icon } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";
import { pill } from "../ui/views/parts.js";

// classes are how a service port fares on a node, worst first.
export const classes = {
  unanswered: { label: "doesn’t answer", tone: "bad", icon: "i-stop" },
  failing: { label: "fails connections", tone: "bad", icon: "i-warn" },
  missing: { label: "is missing", tone: "bad", icon: "i-none" },
  down: { label: "has an endpoint down", tone: "warn", icon: "h-down" },
  troubled: { label: "has a problem", tone: "warn", icon: "i-warn" },
  unknown: { label: "isn’t known: the node doesn’t answer", tone: "", icon: "h-unknown" },
  vacant: { label: "has no endpoint here", tone: "", icon: "h-idle" },
  fine: { label: "is fine", tone: "good", icon: "i-check" },
};

// tones are those of nodes' states; every other is trouble.
const tones = { alive: ["good", "i-check"], "not asked yet": ["", "h-unknown"], absent: ["bad", "i-none"], forbidden: ["bad", "i-stop"], "timed out": ["bad", "h-unknown"], older: ["warn", "i-warn"] };

export function toned(tone, symbol, text) {
  return h("span", { class: `tone ${tone}` }, icon(symbol), h("span", { text }));
}

export function state(name) {
  return toned(...(tones[name] ?? ["bad", "i-warn"]), name);
}

// worst says how a service port fares on the nodes where it fares worst.
export function worst(row, nodes) {
  const c = classes[row.worst];
  if (!c) return toned("", "h-unknown", "isn’t known");
  const n = row.classes[row.worst];
  return toned(c.tone, c.icon, row.worst === "fine" ? c.label : `${c.label} on ${n === nodes ? "all" : n} of ${format.plural(nodes, "node")}`);
}

// planes are pills with the numbers of nodes.
export function planes(counts) {
  return h("span", { class: "planes" }, Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([name, n]) => {
    const p = pill();
    p.show(name);
    p.el.append(` ${format.count(n)}`);
    return p.el;
  }));
}
