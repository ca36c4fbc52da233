// Events as a list: offloads, recalls, changes of health, newest first.

import { h, icon, setText, time } from "../lib/dom.js";
import * as format from "../lib/format.js";
import * as route from "../lib/route.js";
import { capital, plane } from "../lib/words.js";

// moves are the looks of what kproxy calls a move between userspace and the kernel;
// other changes of data plane are none, and its metrics don't count them.
const moves = {
  offload: ["i-down", "good", "Offloaded"],
  recall: ["i-up", "warn", "Recalled"],
  "catch-up": ["i-sync", "", "Catching up"],
};

// look says which icon and tone an event has, and what it is called.
export function look(e) {
  const m = e.message;
  if (e.kind === "health") return / is down/.test(m) ? ["h-down", "bad", "Endpoint down"] : / is up/.test(m) ? ["h-up", "good", "Endpoint up"] : ["h-unknown", "", "Health"];
  if (e.kind === "sync") return ["i-sync", /fail|error/i.test(m) ? "bad" : "", "Sync"];
  if (Object.hasOwn(moves, e.move ?? "")) return moves[e.move];
  if (/^recalled\b/.test(m)) return moves.recall;
  const to = /^\w+ to (\w+)/.exec(m)?.[1];
  if (to === "none") return ["i-stop", "bad", "Not served"];
  if (to) return [plane(to).icon, m.startsWith("none ") ? "good" : "", to === "userspace" ? "Served in userspace" : `Served by ${plane(to).label}`];
  return ["i-swap", "", "Data plane"];
}

// timeline keeps a list element in step with events.
export class Timeline {
  el = h("ol", { class: "timeline" });
  #most;
  #named;
  #first = "";
  #times = [];

  // most is how many events are shown; named whether each names its service.
  constructor({ most, named }) {
    this.#most = most;
    this.#named = named;
  }

  show(events, now) {
    const list = events.slice(0, this.#most);
    const first = list.length + (list[0] ? list[0].time + list[0].service + list[0].message : "") + (list.at(-1)?.time ?? "");
    if (first !== this.#first) {
      this.#first = first;
      this.#times = [];
      this.el.replaceChildren(...list.map((e) => this.#item(e)));
    }
    for (const [el, at] of this.#times) setText(el, format.ago(at, now));
  }

  #item(e) {
    const [id, tone, word] = look(e);
    const at = time("", e.time);
    this.#times.push([at, e.time]);
    const name = this.#named && e.service ? [h("a", { href: route.service(e.service), text: e.service }), h("br")] : [];
    return h("li", { class: tone || null }, icon(id), h("div", { class: "what" }, name, h("b", { text: word + ". " }), capital(e.message)), at);
  }
}
