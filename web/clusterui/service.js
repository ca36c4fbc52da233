// A service port's way through the cluster: its clients, the nodes' data planes, and where its endpoints are.

import { h, setText } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";
import * as planes from "../ui/lib/words.js";
import { get } from "../ui/state/api.js";
import { layers } from "./layers.js";
import * as route from "./route.js";
import { Table } from "./table.js";
import * as words from "./words.js";

const clientsAtMost = 12;

export class ServicePage {
  #key = "";
  #title = h("h1");
  #facts = h("p", { class: "dim" });
  #health = h("p");
  #way = h("div");
  #said = h("p", { class: "small" });
  #table = new Table("Nodes", [["Node"], ["Health"], ["Data plane"], ["Endpoints", "end"], ["On the node", "end"], ["Active", "end"], ["New errors", "end"], ["Differs since"]], (offset) => (location.hash = `${route.service(this.#key)}?offset=${offset}`));

  constructor() {
    this.el = [
      h("p", null, h("a", { href: "#/", text: "All services" })), this.#title,
      h("section", { class: "panel", "aria-label": "Its way" }, this.#health, this.#facts, this.#way, this.#said),
      h("section", { class: "panel" }, h("header", null, h("h2", { text: "On each node" })), this.#table.el),
    ];
  }

  // empty leaves nothing of another service port, or of one that has gone, on the page.
  #empty(why) {
    for (const el of [this.#health, this.#way]) el.replaceChildren();
    setText(this.#facts, why);
    setText(this.#said, "");
    this.#table.show({ rows: [] }, () => [], why);
  }

  async refresh({ key, query }, summary, signal) {
    if (key !== this.#key) this.#empty("");
    this.#key = key;
    setText(this.#title, key);
    let s;
    try {
      s = await get("api/v1/service", { key, offset: query.offset }, signal);
    } catch (e) {
      if (e.status === 404) this.#empty(e.message);
      throw e;
    }
    const clients = await get("api/v1/flows", { service: s.title, limit: clientsAtMost }, signal);
    this.#health.replaceChildren(words.worst(s, s.all));
    setText(this.#facts, `${(s.addresses ?? []).join(", ") || "no address"}; ${format.plural(s.endpoints, "endpoint")} on ${format.plural(s.onAll, "node")}; ${format.count(s.activeConnections)} connections; ${format.count(s.errors)} errors between the nodes’ last two answers${s.split ? "; no view of it is that of most nodes" : ""}`);
    const carried = Object.entries(s.planes).sort((a, b) => b[1] - a[1]);
    const named = s.on.map((o) => ({ text: o.node || "outside the cluster’s nodes", count: o.endpoints }));
    const columns = [
      { title: "Clients", boxes: clients.flows.map((f) => ({ text: f.from, count: f.connections })) },
      { title: "Nodes by data plane", boxes: carried.map(([name, n]) => ({ text: planes.plane(name).label, count: n, plane: name })) },
      { title: "Nodes with endpoints", boxes: named },
    ];
    const edges = [
      ...clients.flows.flatMap((f, i) => carried.map((_, j) => [0, i, j, f.connections / carried.length])),
      ...carried.flatMap(([, n], j) => s.on.map((o, i) => [1, j, i, (n * o.endpoints) / Math.max(1, s.endpoints)])),
    ];
    this.#way.replaceChildren(layers(Math.max(300, this.#way.clientWidth), columns, edges));
    const list = (rows) => rows.map((b) => `${b.text} (${format.count(b.count)})`).join(", ") || "none";
    setText(this.#said, `Clients with live connections: ${list(columns[0].boxes)}. Data planes, by nodes: ${list(columns[1].boxes)}. Endpoints: ${list(named)}${s.onAll > s.on.length ? ` and ${format.plural(s.onAll - s.on.length, "node")} more` : ""}.`);
    this.#table.show({ rows: s.nodes, offset: s.offset, total: s.all }, (n) => {
      const c = words.classes[n.class];
      return [
        h("a", { href: route.node(n.node), text: n.node }), c ? words.toned(c.tone, c.icon, n.class === "unknown" ? `isn’t known: ${n.state}` : c.label) : "isn’t there",
        n.dataplane ? planes.plane(n.dataplane).label : "", n.dataplane ? `${n.usable} of ${n.endpoints}` : "", format.exact(n.here), n.dataplane ? format.count(n.activeConnections) : "", n.dataplane ? format.count(n.errors) : "", n.differs ? format.clock(n.differs, Date.parse(summary.time)) : "",
      ];
    }, "There are no nodes.");
  }
}
