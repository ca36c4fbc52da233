// Tables that are brought up to date in place, and their pages.

import { h, setText } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";

// Table shows rows under headings: [label, class] each. The first cell of a row is its heading.
export class Table {
  #body = h("tbody");
  #count = h("span", { class: "small dim number" });
  #before = h("button", { type: "button", class: "tool", text: "Previous" });
  #after = h("button", { type: "button", class: "tool", text: "Next" });
  #empty = h("p", { class: "empty", hidden: true });
  #headings;
  #offset = 0;
  #limit = 50;

  // onPage is called with the offset of another page.
  constructor(name, headings, onPage) {
    this.#headings = headings;
    const pager = h("div", { class: "pager" }, this.#before, this.#after, this.#count);
    this.#before.addEventListener("click", () => onPage(Math.max(0, this.#offset - this.#limit)));
    this.#after.addEventListener("click", () => onPage(this.#offset + this.#limit));
    this.el = h("div", null, h("table", { class: "data cards", "aria-label": name },
      h("thead", null, h("tr", null, headings.map(([label, c]) => h("th", { scope: "col", class: c, text: label })))), this.#body), this.#empty, pager);
  }

  // show fills in a page of total rows; cells makes the cells of one. Cells that say the same stay, and what has the focus keeps it.
  show({ rows, offset = 0, total = rows.length }, cells, empty) {
    this.#offset = offset;
    const end = offset + rows.length;
    setText(this.#count, total === 0 ? "" : `${format.exact(offset + 1)}–${format.exact(end)} of ${format.exact(total)}`);
    this.#before.disabled = offset === 0;
    this.#after.disabled = end >= total;
    this.#before.hidden = this.#after.hidden = offset === 0 && end >= total;
    this.#empty.hidden = rows.length > 0;
    setText(this.#empty, empty);
    const focus = this.#body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const wanted = rows.map((r) => h("tr", null, cells(r).map((c, i) => {
      const [label, look] = this.#headings[i];
      return i === 0 ? h("th", { scope: "row" }, c) : h("td", { class: look, data: { label } }, c);
    })));
    while (this.#body.rows.length > wanted.length) this.#body.lastElementChild.remove();
    for (const [i, row] of wanted.entries()) {
      const old = this.#body.rows[i];
      if (!old) this.#body.append(row);
      else for (const [j, cell] of [...row.cells].entries()) if (!old.cells[j].isEqualNode(cell)) old.cells[j].replaceWith(cell);
    }
    if (focus) [...this.#body.querySelectorAll("a")].find((a) => a.getAttribute("href") === focus)?.focus({ preventScroll: true });
  }
}
