// Events as a list: offloads, recalls, changes of health, newest first.

import { h, icon, setText, time } from "../lib/dom.js";
import * as format from "../lib/format.js";
import * as route from "../lib/route.js";
import { capital } from "../lib/words.js";

// look says which icon and tone an event has. The words carry the meaning; these
// only help to find it.
export function look(e) {
  const m = e.message;
  if (e.kind === "health") return / is down/.test(m) ? ["h-down", "bad", "Endpoint down"] : / is up/.test(m) ? ["h-up", "good", "Endpoint up"] : ["h-unknown", "", "Health"];
  if (e.kind === "sync") return ["i-sync", /fail|error/i.test(m) ? "bad" : "", "Sync"];
  if (e.move === "catch-up") return ["i-sync", "", "Catching up"];
  if (/^(userspace|none) to (iptables|ipvs)/.test(m)) return ["i-down", "good", "Offloaded"];
  if (/^(iptables|ipvs) to userspace|^recalled/.test(m)) return ["i-up", "warn", "Recalled"];
  if (/to none/.test(m)) return ["i-stop", "bad", "Not served"];
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
