// The connections of a service port, those that are open and those that ended lately,
// as a table.

import { h, icon } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { plane } from "../lib/words.js";
import { labelled } from "./parts.js";

// most is how many rows are shown: more than a person reads, few enough to draw.
export const most = 100;

export function table(open, ended, now) {
  const rows = [...open.map((c) => ({ ...c, lasted: c.ageSeconds, state: "Open" })), ...ended.map((c) => ({ ...c, lasted: c.lastedSeconds, state: `${c.reset ? "Reset" : "Ended"} ${format.ago(c.time, now)}` }))];
  if (rows.length === 0) return h("p", { class: "dim", text: "None is open, and none has ended since kproxy’s start." });
  const head = (text, end) => h("th", { scope: "col", class: end ? "end" : null, text });
  return h("div", null,
    labelled(h("table", { class: "data" },
      h("caption", { class: "sr", text: "Connections, open ones first" }),
      h("thead", null, h("tr", null, head("State"), head("Client"), head("Connected to"), head("Endpoint"), head("Data plane"), head("Lasted", true), head("To endpoint", true), head("To client", true))),
      h("tbody", null, rows.slice(0, most).map((c) => h("tr", { class: c.state === "Open" ? null : "over" },
        h("td", { class: "nowrap number", text: c.state }),
        h("td", { class: "mono", text: c.client }), h("td", { class: "mono", text: c.address }), h("td", { class: "mono", text: c.endpoint }),
        h("td", { class: "nowrap" }, icon(plane(c.dataplane).icon), " ", plane(c.dataplane).label),
        h("td", { class: "end", text: c.lasted > 0 ? (c.lasted < 60 ? format.seconds(c.lasted) : format.duration(c.lasted)) : "–" }),
        h("td", { class: "end", text: format.bytes(c.bytesIn) }), h("td", { class: "end", text: format.bytes(c.bytesOut) })))))),
    rows.length > most ? h("p", { class: "dim small", text: `The first ${most}. All that are open: kproxy connections.` }) : null);
}
