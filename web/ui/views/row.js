// One service port in the list. A row element is made once and then shows
// whichever service port is at its place; only what differs is written.

import { h, icon, setAttr, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import * as route from "../lib/route.js";
import { sentence, why as reasonOf } from "../lib/words.js";
import { slots } from "../state/history.js";
import { dots, pill, spark, stateMark } from "./parts.js";

// columns are the list's headings, in order, with the widths that they have in wide and in
// medium rows; the name's can't be hidden.
export const columns = [
  { id: "name", label: "Service and addresses", sort: "name", wide: "minmax(15rem, 2fr)", medium: "minmax(0, 1.6fr)" },
  { id: "plane", label: "Data plane", wide: "8.5rem", medium: "8.5rem" },
  { id: "why", label: "Why", wide: "minmax(11rem, 1.6fr)", medium: "" },
  { id: "endpoints", label: "Endpoints", wide: "11.25rem", medium: "11.25rem" },
  { id: "active", label: "Active", sort: "active", wide: "minmax(6.25rem, 0.7fr)", medium: "minmax(5rem, 0.6fr)" },
  { id: "rate", label: "New per second", sort: "rate", wide: "minmax(7.75rem, 0.7fr)", medium: "" },
  { id: "errors", label: "Errors", sort: "errors", wide: "6rem", medium: "6rem" },
];

export class Row {
  #history;
  #parts = { plane: pill(), state: stateMark(), dots: dots(), active: spark({ slots }), rate: spark({ slots, filled: false }) };
  #namespace = h("span", { class: "dim" });
  #name = h("b");
  #port = h("span", { class: "dim" });
  #link = h("a", { class: "name", tabindex: "-1" }, this.#namespace, this.#name, this.#port);
  #addresses = h("span", { class: "addresses mono dim" });
  #reason = h("span", { class: "reason" });
  #counts = h("span", { class: "countdown number" });
  #active = h("span", { class: "figure number" });
  #rate = h("span", { class: "figure number" });
  #errors = h("span", { class: "errors number" });
  #trouble = h("span", { class: "trouble" }, icon("i-warn"), h("span"));
  #row = null;

  constructor(history) {
    this.#history = history;
    const cell = (id, ...children) => h("div", { class: `cell ${id}`, role: "gridcell" }, ...children);
    const p = this.#parts;
    this.el = h("div", { class: "row", role: "row", tabindex: "-1" },
      cell("c-name", h("div", { class: "line" }, this.#link, this.#trouble), this.#addresses),
      cell("c-plane", p.plane.el, p.state.el),
      cell("c-why", this.#reason, this.#counts),
      cell("c-endpoints", p.dots.el),
      cell("c-active", this.#active, p.active.el),
      cell("c-rate", this.#rate, p.rate.el),
      cell("c-errors", this.#errors));
  }

  // show brings the row up to date. index counts from 0 in the list as shown.
  show(row, index, now) {
    const fresh = row !== this.#row;
    if (fresh) this.#fill(row);
    this.#row = row;
    setAttr(this.el, "aria-rowindex", index + 2); // the headings are row 1
    this.#parts.dots.show(row, this.#history.downs(row.key), now);
    const left = format.countdown(row.qualifiesAt, now);
    const counts = left !== "" && row.dataplane === "userspace";
    setText(this.#counts, counts ? `moves in ${left}` : "");
    setAttr(this.#reason, "data-short", counts);
  }

  #fill(row) {
    const p = this.#parts;
    setText(this.#namespace, row.namespace + "/");
    setText(this.#name, row.name);
    setText(this.#port, row.port ? `:${row.port}` : "");
    setAttr(this.#link, "title", row.key);
    setAttr(this.#link, "href", route.service(row.key));
    const [first, ...more] = row.addresses;
    setText(this.#addresses, [first ?? "no address", row.protocol, more.length > 0 ? `+${more.length}` : "", row.nodePort ? `:${row.nodePort}` : ""].filter(Boolean).join(" "));
    setAttr(this.#addresses, "title", [...row.addresses, row.nodePort ? `node port ${row.nodePort}` : ""].filter(Boolean).join("\n"));
    setAttr(this.el, "data-condition", row.condition);
    p.plane.show(row.dataplane);
    p.state.show(row.state);
    p.state.el.hidden = row.state === "rejecting"; // the data plane says it: none
    const why = [row.fault, row.reason === "qualified" ? "" : row.reason, row.degraded].filter(Boolean).map(sentence).join(" ") || reasonOf(row);
    setText(this.#reason, why);
    setAttr(this.#reason, "title", why);
    setText(this.#active, format.count(row.connections.active));
    setText(this.#rate, format.rate(row.rates.connections));
    setAttr(this.#active, "data-zero", row.connections.active === 0);
    setAttr(this.#rate, "data-zero", row.rates.connections === 0);
    const { failed, retried } = row.connections;
    setText(this.#errors, failed + retried === 0 ? "" : [failed > 0 ? `${format.count(failed)} failed` : "", retried > 0 ? `${format.count(retried)} retried` : ""].filter(Boolean).join(", "));
    setAttr(this.#errors, "data-tone", row.rates.failed > 0 ? "bad" : failed > 0 ? "warn" : null);
    const trouble = row.problems?.length > 0 ? row.problems.join("\n") : "";
    this.#trouble.hidden = trouble === "";
    setText(this.#trouble.lastChild, trouble === "" ? "" : row.problems.length > 1 ? `${row.problems.length} problems` : "1 problem");
    setAttr(this.#trouble, "title", trouble || null);
  }

  // draw brings the sparklines up to date; the list calls it once a second.
  draw() {
    if (!this.#row) return;
    const t = this.#history.track(this.#row.key);
    this.#parts.active.show(t.active);
    this.#parts.rate.show(t.connections);
  }
}
