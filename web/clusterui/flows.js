// Who talks to what: live connections of all nodes, as a picture and as a table.

import { h, setText } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";
import { get } from "../ui/state/api.js";
import { layers } from "./layers.js";
import { Table } from "./table.js";

const drawnAtMost = 24;

export class Flows {
  #picture = h("div");
  #said = h("p", { class: "small dim" });
  #table = new Table("Flows", [["Client"], ["Service port"], ["Connections", "end"], ["Bytes", "end"], ["Nodes", "end"]], () => {});

  constructor() {
    this.el = [
      h("h1", { text: "Who talks to what" }), this.#said,
      h("section", { class: "panel", "aria-label": "Map" }, this.#picture),
      h("section", { class: "panel", "aria-label": "Flows" }, this.#table.el),
    ];
  }

  async refresh(_, summary, signal) {
    const list = await get("api/v1/flows", { limit: 100 }, signal);
    const drawn = list.flows.slice(0, drawnAtMost);
    const froms = [...new Set(drawn.map((f) => f.from))], tos = [...new Set(drawn.map((f) => f.to))];
    const sum = (of, name) => drawn.filter((f) => f[of] === name).reduce((n, f) => n + f.connections, 0);
    const column = (title, names, of) => ({ title, boxes: names.map((text) => ({ text, count: sum(of, text) })) });
    this.#picture.replaceChildren(layers(Math.max(300, this.#picture.clientWidth), [column("Clients", froms, "from"), column("Service ports", tos, "to")], drawn.map((f) => [0, froms.indexOf(f.from), tos.indexOf(f.to), f.connections])));
    setText(this.#said, `Live connections where they begin, the busiest ${format.plural(list.flows.length, "pair")} of ${format.exact(list.pairs)}. A client is named by the node whose address it has, by a service that it is an endpoint of, or by its address.${list.unlisted ? ` ${format.plural(list.unlisted, "connection")} of rarer pairs aren’t counted.` : ""}${list.unknown ? ` Those of ${list.unknown} of ${format.plural(summary.nodes, "node")} aren’t known.` : ""}`);
    this.#table.show({ rows: list.flows }, (f) => [f.from, f.to, format.exact(f.connections), format.bytes(f.bytes), format.exact(f.nodes)], list.unknown === summary.nodes ? "No node’s connections are known." : "There are no connections.");
  }
}
