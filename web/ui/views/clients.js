// Who talks to whom, and who was refused: a service port's clients, as far back as
// kproxy remembers (/api/v1/clients, /api/v1/refused).

import { h, icon } from "../lib/dom.js";
import * as format from "../lib/format.js";
import * as route from "../lib/route.js";
import { capital, plane, sentence } from "../lib/words.js";
import { labelled } from "./parts.js";

// matrix turns pairs into rows of clients and columns of endpoints: {clients: [{client,
// total, refused, cells}], endpoints, most}, most connections first. What no endpoint took is
// only in refused. Pure.
export function matrix(talks) {
  const endpoints = [], rows = new Map();
  for (const t of talks) {
    if (t.connections > 0 && !endpoints.includes(t.endpoint)) endpoints.push(t.endpoint);
    const row = rows.get(t.client) ?? { client: t.client, total: 0, refused: 0, bytes: 0, cells: new Map() };
    rows.set(t.client, row);
    row.total += t.connections;
    row.refused += t.refused;
    row.bytes += t.bytesIn + t.bytesOut;
    if (t.connections > 0) row.cells.set(t.endpoint, t.connections);
  }
  endpoints.sort();
  const clients = [...rows.values()].sort((a, b) => b.total + b.refused - a.total - a.refused);
  return { clients, endpoints, most: Math.max(1, ...talks.map((t) => t.connections)) };
}

// talks makes the table of who talks to whom; onFollow is called with a client whose way
// is to be drawn.
export function talks({ talks: list, others }, onFollow) {
  if (list.length === 0) return h("p", { class: "dim", text: "No client yet." });
  const m = matrix(list);
  const head = (text, end) => h("th", { scope: "col", class: end ? "end" : null, text });
  const cell = (n) => {
    const td = h("td", { class: "end heat", text: n > 0 ? format.count(n) : "" });
    if (n > 0) td.style.setProperty("--heat", `${Math.round(8 + (32 * n) / m.most)}%`);
    return td;
  };
  return h("div", null,
    h("table", { class: "data talks" },
      h("caption", { class: "sr", text: "Connections of each client to each endpoint" }),
      h("thead", null, h("tr", null, head("Client"), m.endpoints.map((e) => h("th", { scope: "col", class: "end mono", text: e })), head("Refused", true), head("Bytes", true))),
      h("tbody", null, m.clients.map((c) => h("tr", null,
        h("th", { scope: "row" }, h("button", { type: "button", class: "link mono", text: c.client, title: "Follow this client in the drawing", on: { click: () => onFollow(c.client) } })),
        m.endpoints.map((e) => cell(c.cells.get(e) ?? 0)),
        h("td", { class: c.refused > 0 ? "end error" : "end", text: c.refused > 0 ? format.count(c.refused) : "" }),
        h("td", { class: "end", text: c.bytes > 0 ? format.bytes(c.bytes) : "" }))))),
    others > 0 ? h("p", { class: "dim small", text: `And ${format.exact(others)} connections of pairs that there was no room for.` }) : null);
}

// refused makes the list of connections that no endpoint took; named says that each
// names its service.
export function refused(list, now, named) {
  return labelled(h("table", { class: "data refused" },
    h("caption", { class: "sr", text: "Connections that were refused or dropped" }),
    h("thead", null, h("tr", null, ["When", "Client", named ? "Service" : "", "Connected to", "Endpoint", "Why"].filter(Boolean).map((text) => h("th", { scope: "col", text })))),
    h("tbody", null, list.map((e) => h("tr", null,
      h("td", { class: "nowrap number", title: format.ago(e.time, now), text: format.clock(e.time, now) }),
      h("td", { class: "mono", text: e.client }),
      named ? h("td", { class: "whole" }, e.service ? h("a", { href: route.service(e.service), text: e.service }) : h("span", { class: "dim", text: "none" })) : null,
      h("td", { class: "mono", text: e.address }), h("td", { class: "mono", text: e.endpoint || "–" }),
      h("td", { class: "whole" }, e.dataplane ? [icon(plane(e.dataplane).icon), " "] : null, sentence(capital(e.refused))))))));
}
