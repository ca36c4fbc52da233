// Search, filter, order and columns of the overview.

import { h, icon, setText } from "../lib/dom.js";
import { orders } from "../lib/filter.js";
import * as format from "../lib/format.js";
import * as words from "../lib/words.js";
import { columns } from "./row.js";

export class Filters {
  #inputs = {};
  #columns = new Map();

  // onChange is called with the fields that changed, onCSV to save the list.
  constructor(onChange, onCSV) {
    const i = this.#inputs;
    const select = (name, label, choices) => {
      i[name] = h("select", { id: `filter-${name}`, on: { change: (e) => onChange({ [name]: e.target.value }) } }, choices.map(([value, text]) => h("option", { value, text })));
      return h("div", { class: "field" }, h("label", { for: `filter-${name}`, text: label }), i[name]);
    };
    i.q = h("input", {
      type: "search", id: "search", placeholder: "Search by name, address, reason …", autocomplete: "off", spellcheck: "false",
      "aria-keyshortcuts": "/", on: { input: (e) => onChange({ q: e.target.value }) },
    });
    i.clear = h("button", { type: "button", class: "tool", text: "Clear", on: { click: () => onChange({ q: "", plane: "", state: "", condition: "" }) } });
    const hidden = () => [...this.#columns].filter(([, box]) => !box.checked).map(([id]) => id).join(",");
    for (const c of columns.slice(1)) this.#columns.set(c.id, h("input", { type: "checkbox", checked: true, on: { change: () => onChange({ hide: hidden() }) } }));
    this.el = h("form", { class: "filters", role: "search", on: { submit: (e) => e.preventDefault() } },
      h("div", { class: "field search" }, h("label", { for: "search", class: "sr", text: "Search services" }), icon("i-search"), i.q, h("kbd", { "aria-hidden": "true", text: "/" })),
      select("state", "State", [["", "All"], ...Object.keys(words.states).map((st) => [st, words.state(st).label])]),
      select("sort", "Sort by", Object.entries(orders).map(([k, v]) => [k === "worst" ? "" : k, v.label])),
      h("details", { class: "menu" }, h("summary", { class: "tool", text: "Columns" }), h("div", { class: "panel" }, columns.slice(1).map((c) => h("label", { class: "check" }, this.#columns.get(c.id), c.label)))),
      h("button", { type: "button", class: "tool", text: "CSV", title: "Save the list as it is shown, with all columns", on: { click: onCSV } }),
      i.clear);
  }

  // show brings the form up to date; rows are all there are, which its choices count.
  show(filter, empty, rows) {
    const i = this.#inputs;
    const count = new Map();
    for (const r of rows) count.set(r.state, (count.get(r.state) ?? 0) + 1);
    for (const o of i.state.options) {
      const n = o.value === "" ? rows.length : count.get(o.value) ?? 0;
      setText(o, `${o.value === "" ? "All" : words.state(o.value).label} (${format.exact(n)})`);
      o.hidden = n === 0 && filter.state !== o.value && o.value !== "";
    }
    for (const name of ["state", "sort"]) if (i[name].value !== filter[name]) i[name].value = filter[name];
    if (i.q.value !== filter.q && document.activeElement !== i.q) i.q.value = filter.q;
    if (filter.q === "" && i.q.value !== "") i.q.value = "";
    const hidden = filter.hide.split(",");
    for (const [id, box] of this.#columns) box.checked = !hidden.includes(id);
    i.clear.hidden = empty;
  }

  focus() {
    this.#inputs.q.focus();
    this.#inputs.q.select();
  }
}
