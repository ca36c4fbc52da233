// The service ports: the heat map, filters, and the table that says the same.

import { h, icon, setText } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";
import * as planes from "../ui/lib/words.js";
import { get } from "../ui/state/api.js";
import { Heat, fit, modes } from "./heat.js";
import * as route from "./route.js";
import { Table } from "./table.js";
import * as words from "./words.js";

export class Services {
  #query = {};
  #heat = new Heat(([from, n], [, nodes], node) => (n === 1 && nodes === 1 && this.#rows[from - this.#offset] ? (location.hash = route.service(this.#rows[from - this.#offset].key)) : this.#go({ offset: from, node: nodes === 1 && n > 1 ? node : this.#query.node })));
  #rows = [];
  #offset = 0;
  #timer = 0;
  #inputs = {};
  #shown = h("p", { class: "small dim shown number", role: "status" });
  #table = new Table("Service ports", [["Service port"], ["Health"], ["Data planes, by nodes"], ["New errors", "end"], ["Active", "end"], ["Nodes that differ", "end"]], (offset) => this.#go({ offset }));

  constructor() {
    const select = (name, label, choices) => {
      this.#inputs[name] = h("select", { id: `filter-${name}`, on: { change: (e) => this.#go({ [name]: e.target.value, offset: 0 }) } }, choices.map(([value, text]) => h("option", { value, text })));
      return h("div", { class: "field" }, h("label", { for: `filter-${name}`, text: label }), this.#inputs[name]);
    };
    this.#inputs.q = h("input", {
      type: "search", id: "search", placeholder: "Search by name …", autocomplete: "off", spellcheck: "false",
      on: { input: (e) => {
        clearTimeout(this.#timer);
        this.#timer = setTimeout(() => this.#go({ q: e.target.value, offset: 0 }), 250);
      } },
    });
    this.el = [
      h("h1", { class: "sr", text: "Services on all nodes" }),
      h("form", { class: "filters", role: "search", on: { submit: (e) => e.preventDefault() } },
        h("div", { class: "field search" }, h("label", { for: "search", class: "sr", text: "Search service ports" }), icon("i-search"), this.#inputs.q),
        select("class", "Health on some node", [["", "All"], ...Object.entries(words.classes).map(([k, c]) => [k, c.label]), ["differs", "nodes differ"]]),
        select("plane", "Data plane on some node", [["", "All"], ...planes.planeOrder.map((p) => [p, planes.plane(p).label])]),
        select("by", "Colour by", Object.entries(modes).map(([k, text]) => [k === "class" ? "" : k, text])),
        h("button", { type: "button", class: "tool", text: "Clear", on: { click: () => (location.hash = "#/") } })),
      h("section", { class: "panel", "aria-label": "Heat map" }, this.#shown, this.#heat.el),
      h("section", { class: "panel", "aria-label": "Service ports" }, this.#table.el),
    ];
  }

  #go(change) {
    location.hash = route.to("services", { ...this.#query, ...change });
  }

  async refresh({ query }, summary, signal) {
    this.#query = query;
    for (const name of ["q", "class", "plane", "by"]) {
      const i = this.#inputs[name], value = query[name] ?? "";
      if (i.value !== value && !(name === "q" && document.activeElement === i)) i.value = value;
    }
    const { q, plane, node, class: c, offset } = query;
    const filter = { q, plane, node, class: c };
    const [list, grid] = await Promise.all([
      get("api/v1/services", { ...filter, offset }, signal),
      get("api/v1/grid", { ...filter, ...fit(this.#heat.width, Math.max(1, summary.services), Math.max(1, summary.nodes)) }, signal),
    ]);
    this.#rows = list.rows;
    this.#offset = list.offset;
    setText(this.#shown, `${list.total === list.all ? "" : `${format.exact(list.total)} of `}${format.plural(list.all, "service port")}, rows, broken ones first; ${format.plural(summary.nodes, "node")}, columns, by name${node ? `. The filter is about node ${node}` : ""}.`);
    this.#heat.show(grid, Object.keys(modes).includes(query.by) ? query.by : "class");
    this.#table.show(list, (r) => [
      h("a", { href: route.service(r.key), text: r.key }), words.worst(r, summary.nodes), words.planes(r.planes),
      format.count(r.errors), format.count(r.activeConnections), r.differ > 0 ? format.exact(r.differ) : r.split ? "no majority" : "–",
    ], list.all > 0 ? "No service port matches." : "No node has told of a service port yet.");
  }
}
