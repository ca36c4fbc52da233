// The verdict: how all service ports fare, in kproxy's words, worst first. Each part is
// a button that leaves only its service ports in the list.

import { h, icon, setAttr, setText } from "../lib/dom.js";
import { conditions } from "../lib/filter.js";

// looks are the tone and icon of each condition; what has neither is no news.
const looks = {
  unanswered: ["bad", "i-stop"], failing: ["bad", "i-warn"], down: ["warn", "h-down"],
  troubled: ["warn", "i-warn"], vacant: ["", "i-none"], fine: ["good", "i-check"],
};

export class Verdict {
  #parts = new Map();

  // onPart is called with a condition when its part is pressed.
  constructor(onPart) {
    for (const condition of conditions) {
      const [tone, id] = looks[condition], text = h("span");
      this.#parts.set(condition, { text, el: h("button", { type: "button", class: tone || null, hidden: true, data: { condition }, on: { click: () => onPart(condition) } }, icon(id), text) });
    }
    this.el = h("div", { class: "verdict", role: "group", "aria-label": "How the services fare" }, [...this.#parts.values()].map((p) => p.el));
  }

  // show brings the parts up to date; condition is the one that the list shows only.
  show(tallies, condition) {
    for (const [name, part] of this.#parts) {
      const t = tallies.find((x) => x.condition === name);
      part.el.hidden = !t;
      setAttr(part.el, "aria-pressed", String(condition === name));
      if (t) setText(part.text, t.text[0].toUpperCase() + t.text.slice(1));
    }
  }
}
