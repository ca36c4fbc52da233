// The live connections of a service port, as a table.

import { h, icon } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { plane } from "../lib/words.js";

// most is how many rows are shown: more than a person reads, few enough to draw.
export const most = 100;

export function table(list) {
  if (list.length === 0) return h("p", { class: "dim", text: "No connection is open now. Short ones may come and go between two readings; the counters above include them all." });
  const shown = list.slice(0, most);
  const head = (text, end) => h("th", { scope: "col", class: end ? "end" : null, text });
  return h("div", null,
    h("table", { class: "data" },
      h("caption", { class: "sr", text: "Live connections" }),
      h("thead", null, h("tr", null, head("Client"), head("Connected to"), head("Endpoint"), head("Data plane"), head("Age", true), head("To endpoint", true), head("To client", true))),
      h("tbody", null, shown.map((c) => h("tr", null,
        h("td", { class: "mono", text: c.client }), h("td", { class: "mono", text: c.address }), h("td", { class: "mono", text: c.endpoint }),
        h("td", { class: "nowrap" }, icon(plane(c.dataplane).icon), " ", plane(c.dataplane).label),
        h("td", { class: "end", text: c.ageSeconds > 0 ? format.duration(c.ageSeconds) : "–" }),
        h("td", { class: "end", text: format.bytes(c.bytesIn) }), h("td", { class: "end", text: format.bytes(c.bytesOut) }))))),
    list.length > most ? h("p", { class: "dim small", text: `The first ${most} of ${format.exact(list.length)}. All of them: kproxy connections.` }) : null);
}
