// Search and filters of the overview.

import { h, icon, setAttr } from "../lib/dom.js";
import { healths, orders } from "../lib/filter.js";
import * as words from "../lib/words.js";

export class Filters {
  #inputs = {};

  // onChange is called with the fields that changed.
  constructor(onChange) {
    const i = this.#inputs;
    const select = (name, label, choices) => {
      i[name] = h("select", { id: `filter-${name}`, on: { change: (e) => onChange({ [name]: e.target.value }) } }, choices.map(([value, text]) => h("option", { value, text })));
      return h("div", { class: "field" }, h("label", { for: `filter-${name}`, text: label }), i[name]);
    };
    i.q = h("input", {
      type: "search", id: "search", placeholder: "Search by name, address, reason …", autocomplete: "off", spellcheck: "false",
      "aria-keyshortcuts": "/", on: { input: (e) => onChange({ q: e.target.value }) },
    });
    i.attention = h("button", { type: "button", class: "tool", "aria-pressed": "false", on: { click: () => onChange({ attention: i.attention.getAttribute("aria-pressed") !== "true" }) } }, icon("i-warn"), "Needs attention");
    i.clear = h("button", { type: "button", class: "tool", text: "Clear", on: { click: () => onChange({ q: "", plane: "", state: "", health: "", attention: false }) } });
    this.el = h("form", { class: "filters", role: "search", on: { submit: (e) => e.preventDefault() } },
      h("div", { class: "field search" }, h("label", { for: "search", class: "sr", text: "Search services" }), icon("i-search"), i.q, h("kbd", { "aria-hidden": "true", text: "/" })),
      select("plane", "Data plane", [["", "All"], ...words.planeOrder.map((p) => [p, words.plane(p).label])]),
      select("state", "State", [["", "All"], ...Object.keys(words.states).map((st) => [st, words.state(st).label])]),
      select("health", "Health", [["", "All"], ...Object.entries(healths).map(([k, v]) => [k, v.label])]),
      select("sort", "Sort by", Object.entries(orders).map(([k, v]) => [k === "name" ? "" : k, v.label])),
      i.attention, i.clear);
  }

  show(filter, empty) {
    const i = this.#inputs;
    for (const name of ["plane", "state", "health", "sort"]) if (i[name].value !== filter[name]) i[name].value = filter[name];
    if (i.q.value !== filter.q && document.activeElement !== i.q) i.q.value = filter.q;
    if (filter.q === "" && i.q.value !== "") i.q.value = "";
    setAttr(i.attention, "aria-pressed", String(filter.attention));
    i.clear.hidden = empty;
  }

  focus() {
    this.#inputs.q.focus();
    this.#inputs.q.select();
  }
}
