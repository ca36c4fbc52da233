// Small pieces that several views show. Each maker returns an element and a
// function that brings it up to date without making it anew.

import { h, icon, s, setAttr, setIcon, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { area, ceiling, line, peak, thin } from "../lib/spark.js";
import * as words from "../lib/words.js";

// pill names a data plane: icon, word and colour.
export function pill() {
  const mark = icon("i-none"), text = h("span");
  const el = h("span", { class: "pill" }, mark, text);
  return {
    el,
    show(name) {
      const p = words.plane(name);
      setAttr(el, "data-plane", name);
      setIcon(mark, p.icon);
      setText(text, p.label);
    },
  };
}

// stateMark names a state.
export function stateMark() {
  const mark = icon("i-none"), text = h("span");
  const el = h("span", { class: "state" }, mark, text);
  return {
    el,
    show(name) {
      const st = words.state(name);
      setIcon(mark, st.icon);
      setText(text, st.label);
      setAttr(el, "title", st.means);
      setAttr(el, "data-state", name);
    },
  };
}

// scroller is a box that scrolls by itself. It takes the focus, so that it can be
// scrolled by keyboard, and has a name.
export function scroller(name, ...children) {
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": name }, ...children);
}

// labelled repeats a table's headings in its cells: on a phone each row is a card.
export function labelled(table) {
  const headings = [...table.tHead.rows[0].cells].map((c) => c.textContent);
  table.classList.add("cards");
  for (const r of table.tBodies[0].rows) [...r.cells].forEach((c, i) => { c.dataset.label = headings[i]; });
  return table;
}

// healthIcon is the symbol of an endpoint: its shape says as much as its colour.
export function healthIcon(e) {
  return e.health === "up" && !e.usable ? "h-idle" : words.health(e.health).icon;
}

// healthText says the same in words.
export function healthText(e) {
  const text = `${e.address} ${words.health(e.health).label}`;
  if (e.usable || e.health === "down") return text;
  return `${text}, takes no new connections`;
}

// dots shows a row's endpoints one by one.
export function dots() {
  const marks = h("span", { class: "dots", "aria-hidden": "true" });
  const text = h("span", { class: "number" });
  const el = h("span", { class: "endpoints" }, marks, text);
  let shown = "";
  return {
    el,
    // show draws the endpoints at now; downs are those that were found down lately.
    show(row, downs, now) {
      const key = row.dots.map((d) => d.address + d.health + d.usable + (downs.get(d.address)?.times ?? "")).join();
      if (key !== shown) {
        shown = key;
        marks.replaceChildren(...row.dots.map((d) => {
          const was = d.health === "up" ? downs.get(d.address) : undefined;
          const mark = icon(was && d.usable ? "h-mended" : healthIcon(d));
          mark.classList.add("dot");
          mark.dataset.health = d.health;
          mark.append(s("title", { text: healthText(d) + (was ? `; was down ${format.plural(was.times, "time")}, last at ${format.clock(was.last, now)}` : "") }));
          return mark;
        }));
      }
      const { usable, total, down, unknown } = row.endpoints;
      const mended = row.dots.filter((d) => d.health === "up" && downs.has(d.address)).length;
      setText(text, total === 0 ? "" : down === total ? `all ${total} down` : `${usable} of ${total} usable` + (down > 0 ? `, ${down} down` : mended > 0 ? `, ${mended} down lately` : unknown === total ? ", unchecked" : ""));
      setAttr(el, "data-down", down > 0 || (usable === 0 && total > 0));
    },
  };
}

// spark is a small chart of one figure. Its box is fixed, so that it costs no
// layout; what it shows stands as a number beside it.
export function spark({ slots, filled = true }) {
  const width = 96, height = 26;
  const under = filled ? s("path", { class: "under" }) : null;
  const over = s("path", { class: "over" });
  const el = s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false" }, under, over);
  const points = Math.min(slots, Math.round(width * 0.75));
  return {
    el,
    show(values) {
      const samples = thin(values, Math.max(Math.min(values.length, 2), Math.round((points * values.length) / slots)));
      const top = peak(samples);
      el.classList.toggle("blank", top === 0); // a line along the edge says nothing
      if (top === 0) return;
      const max = ceiling(top);
      const box = { width, height, max, slots: Math.max(points, samples.length) };
      over.setAttribute("d", line(samples, box));
      under?.setAttribute("d", area(samples, box));
    },
  };
}
