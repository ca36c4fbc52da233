// The heat map: service ports by nodes, on a canvas of as many cells as have room. Its twin for those who don't see it is
// the table under it.

import { h, setText } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";
import * as planes from "../ui/lib/words.js";
import * as words from "./words.js";

const least = 6, most = 24, tall = 420; // pixels of a cell, and of all

// modes are what cells are coloured by.
export const modes = { class: "Health", plane: "Data plane", errors: "Errors" };

// fit returns how many rows and columns have room for so many service ports and nodes.
export function fit(width, services, nodes) {
  return { rows: Math.max(1, Math.min(services, Math.floor(tall / least))), columns: Math.max(1, Math.min(nodes, Math.floor(width / least))) };
}

// decode returns the bytes of a grid's cells.
export function decode(grid) {
  return Uint8Array.from(atob(grid.cells), (c) => c.charCodeAt(0));
}

export class Heat {
  #grid = null;
  #cells = new Uint8Array();
  #frame = 0;
  #mode = "class";
  #at = [0, 0]; // row, column
  #canvas = h("canvas", { class: "heat", tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-label": "Service ports by nodes. Arrow keys move, Enter opens; the table that follows says the same.", "aria-describedby": "heat-said" });
  #said = h("p", { class: "small heat-said number", id: "heat-said", "aria-live": "polite" });
  #legend = h("ul", { class: "heat-legend" });
  #probe = h("span", { hidden: true });

  // onOpen is called with the indices of the first service port and of the first node of a cell, and how many it stands for.
  constructor(onOpen) {
    this.el = h("div", null, this.#canvas, this.#said, this.#legend, this.#probe);
    const c = this.#canvas;
    c.addEventListener("pointermove", (e) => this.#point(e));
    c.addEventListener("click", (e) => {
      this.#point(e);
      this.#open(onOpen);
    });
    c.addEventListener("focus", () => this.#move(0, 0));
    c.addEventListener("blur", () => this.draw());
    c.addEventListener("keydown", (e) => {
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -1e6], End: [0, 1e6] }[e.key];
      if (by) this.#move(...by);
      else if (e.key === "Enter") this.#open(onOpen);
      else return;
      e.preventDefault();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new MutationObserver(() => this.draw()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  get width() {
    return this.#canvas.clientWidth || 320;
  }

  show(grid, mode) {
    this.#grid = grid;
    this.#mode = mode;
    this.#cells = decode(grid);
    this.#at = [Math.min(this.#at[0], Math.max(0, grid.rows - 1)), Math.min(this.#at[1], Math.max(0, grid.columns - 1))];
    this.draw();
    this.#say();
  }

  #size() {
    const g = this.#grid;
    return [this.width / g.columns, Math.min(most, tall / g.rows)];
  }

  #point(e) {
    const g = this.#grid;
    if (!g || g.rows * g.columns === 0) return;
    const [w, height] = this.#size();
    this.#move(Math.floor(e.offsetY / height) - this.#at[0], Math.floor(e.offsetX / w) - this.#at[1]);
  }

  #move(down, right) {
    const g = this.#grid;
    if (!g || g.rows * g.columns === 0) return;
    this.#at = [Math.max(0, Math.min(g.rows - 1, this.#at[0] + down)), Math.max(0, Math.min(g.columns - 1, this.#at[1] + right))];
    this.draw();
    this.#say();
  }

  // range is what a row or column stands for: the first, and how many.
  #range(i, of, all) {
    const from = Math.floor((i * all) / of);
    return [from, Math.floor(((i + 1) * all) / of) - from];
  }

  #open(onOpen) {
    const g = this.#grid;
    if (g && g.rows * g.columns > 0) onOpen(this.#range(this.#at[0], g.rows, g.services), this.#range(this.#at[1], g.columns, g.all), g.nodes[this.#at[1]]);
  }

  #cell(row, column) {
    const at = 3 * (row * this.#grid.columns + column);
    return { class: this.#grid.classes[this.#cells[at]] ?? "", plane: this.#cells[at + 1] === 255 ? "several" : this.#grid.planes[this.#cells[at + 1]] ?? "", errors: this.#cells[at + 2] };
  }

  #say() {
    const g = this.#grid;
    if (g.rows * g.columns === 0) return setText(this.#said, "");
    const [row, column] = this.#at, c = this.#cell(row, column);
    const [from, n] = this.#range(row, g.rows, g.services), [, nodes] = this.#range(column, g.columns, g.all);
    const which = n === 1 ? `service port ${format.exact(from + 1)}` : `service ports ${format.exact(from + 1)}–${format.exact(from + n)}`;
    const where = nodes === 1 ? `node ${g.nodes[column]}` : `${nodes} nodes from ${g.nodes[column]} on`;
    const fares = words.classes[c.class]?.label ?? "isn’t there";
    const plane = c.plane === "several" ? "several data planes" : c.plane ? planes.plane(c.plane).label : "";
    setText(this.#said, `In the order of the table, ${which} on ${where}: ${n * nodes > 1 ? "the worst " : ""}${fares}${plane ? `; ${plane}` : ""}${c.errors ? `; ${c.errors === 1 ? "1 failed connection" : `${format.exact(2 ** (c.errors - 1))} failed connections or more`} between the node’s last two answers` : ""}.`);
  }

  // colour resolves a colour of tokens.css as it is now.
  #colour(name) {
    this.#probe.style.color = `var(--${name})`;
    return getComputedStyle(this.#probe).color;
  }

  // draw paints with the next frame, however often it is called until then: the pointer moves more often.
  draw() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      if (this.#grid) this.#paint(this.#grid);
    });
  }

  #paint(g) {
    const colours = {};
    for (const name of ["surface", "sunken", "edge", "ink", "good", "good-tint", "bad", "warn", "warn-tint", "none", "none-tint", "userspace", "iptables", "ipvs", "nftables"]) colours[name] = this.#colour(name);
    const [w, height] = g.rows ? this.#size() : [1, 1], scale = devicePixelRatio || 1;
    const canvas = this.#canvas;
    canvas.style.height = `${Math.max(24, Math.round(height * g.rows))}px`;
    canvas.width = Math.round(this.width * scale);
    canvas.height = Math.round(Math.max(24, height * g.rows) * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const line = Math.min(w, height) >= 5 ? 0.5 : 0;
    for (let i = 0; i < g.rows; i++) {
      for (let j = 0; j < g.columns; j++) paint(pen, colours, this.#mode, this.#cell(i, j), j * w, i * height, w - line, height - line);
    }
    if (document.activeElement === canvas || canvas.matches(":hover")) {
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 2;
      pen.strokeRect(this.#at[1] * w, this.#at[0] * height, Math.max(w, 3), Math.max(height, 3));
    }
    this.#explain(colours);
  }

  #explain(colours) {
    const cell = (over) => ({ class: "fine", plane: "", errors: 0, ...over });
    const entries = {
      class: Object.entries(words.classes).map(([name, c]) => [c.label, cell({ class: name })]),
      plane: [...planes.planeOrder.map((name) => [planes.plane(name).label, cell({ plane: name })]), ["several", cell({ plane: "several" })], ["not known", cell({ class: "unknown" })]],
      errors: [["no errors", cell()], ["some", cell({ errors: 2 })], ["many", cell({ errors: 12 })], ["not known", cell({ class: "unknown" })]],
    }[this.#mode];
    this.#legend.replaceChildren(...entries.map(([text, c]) => {
      const mark = h("canvas", { width: "14", height: "14", "aria-hidden": "true" });
      paint(mark.getContext("2d"), colours, this.#mode, c, 0, 0, 14, 14);
      return h("li", null, mark, h("span", { text }));
    }));
  }
}

// paint fills a cell. What isn't known is hatched, and the worst classes have a bar or a cross, so that colour isn't all.
function paint(pen, colours, mode, c, x, y, w, height) {
  const fill = (name) => {
    pen.fillStyle = colours[name];
    pen.fillRect(x, y, w, height);
  };
  if (c.class === "") return fill("surface");
  fill("sunken");
  if (c.class === "unknown") {
    pen.fillStyle = colours.none;
    for (let k = 0; k < w; k += 4) pen.fillRect(x + k, y, 1, height);
    return;
  }
  if (mode === "errors") {
    if (c.errors === 0) return;
    pen.globalAlpha = Math.min(1, 0.35 + c.errors / 16);
    fill("bad");
    pen.globalAlpha = 1;
    return;
  }
  if (mode === "plane") {
    if (c.plane === "several") {
      fill("edge");
      pen.fillStyle = colours.surface;
      return pen.fillRect(x, y + height / 2, w, height / 2);
    }
    return c.plane === "" ? undefined : fill(c.plane);
  }
  fill({ unanswered: "bad", failing: "bad", missing: "bad", down: "warn", troubled: "warn-tint", vacant: "sunken", fine: "good-tint" }[c.class] ?? "none");
  pen.fillStyle = colours.surface;
  if (c.class === "failing") pen.fillRect(x, y + height * 0.4, w, height * 0.2);
  if (c.class === "missing") pen.fillRect(x + w * 0.3, y + height * 0.3, w * 0.4, height * 0.4);
  if (c.class === "troubled") {
    pen.fillStyle = colours.warn;
    pen.fillRect(x + w * 0.3, y + height * 0.3, w * 0.4, height * 0.4);
  }
}
