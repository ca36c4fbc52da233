// "What is this?": how the data plane in use works and what it costs, beside the
// others, for someone who sees it for the first time.

import { h, icon } from "../lib/dom.js";
import * as words from "../lib/words.js";
import { scroller } from "./parts.js";

const levels = ["", "little", "some", "much"];

export function explain(current) {
  const p = words.plane(current);
  return h("div", { class: "explain" },
    h("div", { class: "prose" }, h("p", null, h("b", { text: p.costs.length > 0 ? `How ${p.label} works. ` : `${p.label}. ` }), p.how), h("p", null, h("b", { text: p.costs.length > 0 ? "What it costs. " : "What clients see. " }), p.pays),
      p.costs.length > 0 ? h("p", null, h("a", { href: `/docs/${current}.md`, text: `The packet’s path and the rules, one by one: ${p.label}` })) : null),
    costs(current),
    h("p", { class: "dim small" }, "How much that is on this machine: ", h("code", { text: "kproxy lab compare" }), " measures the same work through every data plane and writes a page with charts."));
}

function costs(current) {
  const planes = words.planeOrder.filter((n) => words.plane(n).costs.length > 0);
  const rows = words.plane("userspace").costs.map((c) => c.what);
  return scroller("Costs of the data planes", h("table", { class: "data costs" },
    h("caption", { class: "sr", text: "What the data planes cost" }),
    h("thead", null, h("tr", null, h("th", { scope: "col", text: "Costs" }), planes.map((n) => h("th", { scope: "col", data: { plane: n, now: n === current } }, icon(words.plane(n).icon), " ", words.plane(n).label, n === current ? h("span", { class: "here", text: "in use" }) : null)))),
    h("tbody", null, rows.map((what, i) => h("tr", null, h("th", { scope: "row", text: what }), planes.map((n) => cost(words.plane(n).costs[i], n, n === current)))))));
}

function cost(c, plane, now) {
  return h("td", { data: { plane, now } }, h("span", { class: "level" }, h("span", { class: "bars", "aria-hidden": "true" }, [1, 2, 3].map((i) => h("i", { class: i <= c.level ? "on" : null }))), h("b", { text: levels[c.level] })), h("span", { class: "small dim", text: c.words }));
}
