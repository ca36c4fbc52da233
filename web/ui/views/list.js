// The virtual list of service ports: a grid of thousands of rows, of which only
// those near the viewport are in the document. It scrolls with the page. One row
// has the tab stop; arrow keys move it (WAI-ARIA APG, grid), and its element stays
// in the document even when it was scrolled away, so that focus is never lost.

import { h, icon, setAttr } from "../lib/dom.js";
import * as route from "../lib/route.js";
import * as virtual from "../lib/window.js";
import { columns, Row } from "./row.js";

export class List {
  #history;
  #rows = [];
  #elements = new Map(); // key → Row
  #spare = [];
  #active = ""; // key of the row with the tab stop
  #now = 0;
  #hidden = null; // ids of the columns left out, as the page's address has them
  #longest = ""; // of the keys
  #height = 0; // of a row, with the gap below it; 0 is not measured
  #top = 0; // of the rows, in the document
  #body = h("div", { class: "rows", role: "rowgroup" });
  #headings;
  #frame = 0;

  // onSort is called with the name of an order when its heading is activated.
  constructor(history, onSort) {
    this.#history = history;
    this.#headings = columns.map((c) => h("div", { class: `heading h-${c.id}`, role: "columnheader" },
      c.sort ? h("button", { type: "button", text: c.label, on: { click: () => onSort(c.sort) } }) : c.label));
    this.el = h("div", { class: "list", role: "grid", "aria-label": "Service ports", "aria-colcount": columns.length },
      h("div", { class: "headings", role: "rowgroup" }, h("div", { class: "heading-row", role: "row", "aria-rowindex": "1" }, this.#headings)),
      this.#body);
    this.#body.addEventListener("keydown", (e) => this.#key(e));
    this.#body.addEventListener("click", (e) => this.#click(e));
    this.#body.addEventListener("focusin", (e) => {
      const row = e.target.closest(".row");
      if (row) this.#stop(row.dataset.key);
    });
    addEventListener("scroll", () => this.#later(), { passive: true });
    // Whatever moves the list changes the page's height or its own width: scrolling
    // itself never has to ask for a layout.
    const resized = new ResizeObserver(() => {
      this.#height = 0;
      this.#later();
    });
    resized.observe(this.el);
    resized.observe(document.body);
  }

  // show replaces the rows, which are in order, and brings all of them up to date.
  show(rows, { sort, hide }, now) {
    this.#rows = rows;
    this.#now = now;
    setAttr(this.el, "aria-rowcount", rows.length + 1);
    columns.forEach((c, i) => {
      if (c.sort) setAttr(this.#headings[i], "aria-sort", c.sort === sort ? (c.sort === "name" ? "ascending" : "descending") : "none");
    });
    this.#choose(hide);
    const longest = rows.reduce((most, r) => (r.key.length > most.length ? r.key : most), "");
    if (longest !== this.#longest) this.#height = 0;
    this.#longest = longest;
    if (!rows.some((r) => r.key === this.#active)) this.#active = rows[0]?.key ?? "";
    this.tick(now);
  }

  // choose shows all columns but those of a list of ids, at both widths of a row.
  #choose(hide) {
    if (hide === this.#hidden) return;
    this.#hidden = hide;
    const ids = hide.split(",");
    const shown = columns.filter((c) => !ids.includes(c.id));
    this.el.dataset.hide = columns.filter((c) => ids.includes(c.id)).map((c) => c.id).join(" ");
    this.el.style.setProperty("--wide", shown.map((c) => c.wide).join(" "));
    this.el.style.setProperty("--medium", shown.map((c) => c.medium).join(" "));
    this.#height = 0;
  }

  // tick updates countdowns and sparklines of what is in the document.
  tick(now) {
    this.#now = now;
    this.#render();
    for (const row of this.#elements.values()) row.draw();
  }

  // focus puts the focus on the row with the tab stop; false if there is no row.
  focus() {
    const at = this.#index(this.#active);
    if (at < 0) return false;
    this.#reveal(at);
    this.#elements.get(this.#active)?.el.focus({ preventScroll: true });
    return true;
  }

  #index(key) {
    return this.#rows.findIndex((r) => r.key === key);
  }

  #later() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#render();
    });
  }

  #render() {
    if (this.#rows.length === 0) return;
    const height = this.#measure();
    if (height === 0) return; // the page isn't shown
    const tall = `${height * this.#rows.length}px`;
    if (this.#body.style.height !== tall) this.#body.style.height = tall;
    const { first, end } = virtual.visible({ top: this.#top - scrollY, viewport: innerHeight, height, total: this.#rows.length });
    const wanted = new Map();
    for (let i = first; i < end; i++) wanted.set(this.#rows[i].key, i);
    const active = this.#index(this.#active);
    if (active >= 0) wanted.set(this.#active, active);
    for (const [key, row] of this.#elements) {
      if (wanted.has(key)) continue;
      this.#elements.delete(key);
      row.el.remove();
      if (this.#spare.length < 40) this.#spare.push(row);
    }
    let before = null;
    for (const [key, i] of [...wanted].sort((a, b) => a[1] - b[1])) {
      const row = this.#elements.get(key) ?? this.#insert(key);
      row.show(this.#rows[i], i, this.#now);
      if (row.fresh) {
        row.fresh = false;
        row.draw();
      }
      const y = `translateY(${i * height}px)`;
      if (row.el.style.transform !== y) row.el.style.transform = y;
      setAttr(row.el, "tabindex", key === this.#active ? "0" : "-1");
      // Screen readers follow the order of the document.
      const next = before ? before.nextSibling : this.#body.firstChild;
      if (next !== row.el && !row.el.contains(document.activeElement)) this.#body.insertBefore(row.el, next);
      before = row.el;
    }
  }

  #insert(key) {
    const row = this.#spare.pop() ?? new Row(this.#history);
    row.el.dataset.key = key;
    row.fresh = true;
    this.#elements.set(key, row);
    this.#body.append(row.el);
    return row;
  }

  // measure finds out how tall a row is, in which the longest name is to fit, and where the list
  // begins, after something may have changed that.
  #measure() {
    if (this.#height === 0) {
      const name = h("a", { class: "name" }, h("b", { text: this.#longest }));
      const trouble = this.#rows.some((r) => r.problems?.length > 0) ? h("span", { class: "trouble" }, icon("i-warn"), "99 problems") : null;
      const probe = h("div", { class: "row" }, h("div", { class: "cell c-name" }, h("div", { class: "line" }, name, trouble)));
      this.el.style.removeProperty("--lines");
      this.#body.append(probe);
      this.el.style.setProperty("--lines", Math.max(1, Math.round(name.scrollHeight / parseFloat(getComputedStyle(name).lineHeight))));
      const { height } = probe.getBoundingClientRect();
      this.#height = height === 0 ? 0 : height + parseFloat(getComputedStyle(probe).marginBottom);
      this.#top = this.#body.getBoundingClientRect().top + scrollY;
      probe.remove();
    }
    return this.#height;
  }

  #stop(key) {
    if (key === this.#active) return;
    const old = this.#elements.get(this.#active);
    if (old) setAttr(old.el, "tabindex", "-1");
    this.#active = key;
    const now = this.#elements.get(key);
    if (now) setAttr(now.el, "tabindex", "0");
  }

  // covered is how much of the viewport's top the sticky parts take.
  #covered() {
    return Math.max(0, this.el.querySelector(".headings").getBoundingClientRect().bottom);
  }

  #key(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const at = this.#index(this.#active);
    if (e.key === "Enter" && e.target.classList.contains("row")) {
      location.hash = route.service(this.#active);
      return;
    }
    const height = this.#measure();
    const page = virtual.page({ viewport: innerHeight, covered: Math.min(this.#covered(), innerHeight / 2), height });
    const to = virtual.move(e.key, at, this.#rows.length, page);
    if (to === undefined) return;
    e.preventDefault();
    this.#stop(this.#rows[to].key);
    this.#reveal(to);
    this.#elements.get(this.#active)?.el.focus({ preventScroll: true });
  }

  #reveal(index) {
    if (index < 0) return;
    const covered = Math.min(this.#covered(), innerHeight / 2);
    const by = virtual.reveal({ index, top: this.#top - scrollY, viewport: innerHeight - 8, covered: covered + 4, height: this.#measure() });
    if (by !== 0) scrollBy({ top: by, behavior: "instant" });
    this.#render();
  }

  #click(e) {
    const row = e.target.closest(".row");
    if (!row || e.target.closest("a") || getSelection()?.toString()) return;
    location.hash = route.service(row.dataset.key);
  }
}
