// The nodes, those with trouble first, and a node.

import { h, icon, setText, time } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";
import { get } from "../ui/state/api.js";
import * as route from "./route.js";
import { Table } from "./table.js";
import * as words from "./words.js";

const states = ["", "silent", "lagging", "problem", "alive", "absent", "forbidden", "timed out", "older", "failed", "not asked yet"];
const labels = { "": "All", silent: "don’t answer", lagging: "lag", problem: "answer with a problem" };

const ago = (iso, now) => (iso ? time(format.ago(iso, now), iso) : "");

// lag says how far a node is behind at now.
function lag(n, now) {
  if (n.differ === 0) return n.classes.unknown ? "isn’t known" : "none";
  return `differs from most nodes in ${format.plural(n.differ, "service port")} since ${format.clock(n.differs, now)}`;
}

// note is what a node, or the API server of it, says of its trouble.
const note = (n) => [n.error, ...(n.warnings ?? [])].filter(Boolean).join("; ");

export class Nodes {
  #query = {};
  #select = h("select", { id: "filter-state", on: { change: (e) => (location.hash = route.to("nodes", { state: e.target.value, q: this.#query.q })) } }, states.map((s) => h("option", { value: s, text: labels[s] ?? s })));
  #search = h("input", { type: "search", id: "search", placeholder: "Search by name …", autocomplete: "off", spellcheck: "false", on: { change: (e) => (location.hash = route.to("nodes", { ...this.#query, offset: 0, q: e.target.value })) } });
  #table = new Table("Nodes", [["Node"], ["State"], ["Since"], ["Answered"], ["Lag"], ["Note"], ["Version"], ["Mode"], ["Service ports", "end"], ["Active", "end"], ["New errors", "end"]], (offset) => (location.hash = route.to("nodes", { ...this.#query, offset })));

  constructor() {
    this.el = [
      h("h1", { class: "sr", text: "Nodes" }),
      h("form", { class: "filters", role: "search", on: { submit: (e) => e.preventDefault() } },
        h("div", { class: "field search" }, h("label", { for: "search", class: "sr", text: "Search nodes" }), icon("i-search"), this.#search),
        h("div", { class: "field" }, h("label", { for: "filter-state", text: "Nodes that" }), this.#select)),
      h("section", { class: "panel", "aria-label": "Nodes" }, this.#table.el),
    ];
  }

  async refresh({ query }, summary, signal) {
    const now = Date.parse(summary.time); // by the clock that the other times are of
    this.#query = query;
    if (this.#select.value !== (query.state ?? "")) this.#select.value = query.state ?? "";
    if (document.activeElement !== this.#search) this.#search.value = query.q ?? "";
    const list = await get("api/v1/nodes", query, signal);
    this.#table.show(list, (n) => [
      h("a", { href: route.node(n.node), text: n.node }), words.state(n.state), ago(n.since, now), ago(n.answered, now), lag(n, now), note(n),
      n.version, n.mode, ...[n.services, n.activeConnections, n.errors].map((x) => (n.answering ? format.count(x) : "")),
    ], list.all > 0 ? "No node matches." : "No nodes are known of.");
  }
}

export class NodePage {
  #title = h("h1");
  #state = h("p");
  #note = h("p", { class: "callout warn", hidden: true });
  #facts = h("p", { class: "small dim" });
  #command = h("pre", { class: "small" });
  #table = new Table("Service ports on this node", [["Service port"], ["On all nodes"], ["Data planes, by nodes"], ["New errors", "end"]], (offset) => (location.hash = `${route.node(this.#name)}?offset=${offset}`));
  #name = "";

  constructor() {
    this.el = [
      h("p", null, h("a", { href: "#/nodes", text: "All nodes" })), this.#title,
      h("section", { class: "panel", "aria-label": "State" }, this.#state, this.#note, this.#facts, this.#command),
      h("section", { class: "panel" }, h("header", null, h("h2", { text: "Service ports in which it differs from most nodes" })), this.#table.el),
    ];
  }

  // empty leaves nothing of another node, or of one that has gone, on the page.
  #empty(why) {
    this.#state.replaceChildren();
    this.#note.hidden = why === "";
    setText(this.#note, why);
    for (const el of [this.#facts, this.#command]) setText(el, "");
    this.#table.show({ rows: [] }, () => [], "");
  }

  async refresh({ key, query }, summary, signal) {
    const now = Date.parse(summary.time);
    if (key !== this.#name) this.#empty("");
    this.#name = key;
    setText(this.#title, `Node ${key}`);
    let list, services;
    try {
      [list, services] = await Promise.all([get("api/v1/nodes", { node: key }, signal), get("api/v1/services", { node: key, class: "differs", offset: query.offset }, signal)]);
    } catch (e) {
      if (e.status === 404) this.#empty(e.message);
      throw e;
    }
    const [n] = list.rows;
    this.#state.replaceChildren(words.state(n.state), h("span", { class: "dim" }, " since ", ago(n.since, now)));
    this.#note.hidden = note(n) === "";
    setText(this.#note, note(n));
    setText(this.#facts, [`pod ${n.pod || "–"}`, `version ${n.version || "–"}`, `mode ${n.mode || "–"}`, `answered ${format.ago(n.answered, now)}`, `pass ${format.exact(n.generation)}, the last that succeeded at ${format.clock(n.lastSuccess, now)}`, `lag: ${lag(n, now)}`].join("; "));
    setText(this.#command, `kubectl kproxy status --node ${key} -o wide`);
    this.#table.show(services, (r) => [h("a", { href: route.service(r.key), text: r.key }), words.worst(r, list.all), words.planes(r.planes), format.count(r.errors)], n.answering ? "It differs in none." : "That isn’t known, as it doesn’t answer.");
  }
}
