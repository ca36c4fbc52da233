// The node's page: what this host can do and why not, how long syncs take, how
// full the connection table is, what is programmed, and where services come from.

import { byId, h, icon, s, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { ceiling } from "../lib/spark.js";
import { sentence } from "../lib/words.js";
import { scroller } from "./parts.js";

export class NodePage {
  #store;
  #page = byId("page-node");
  #shown = false;
  #title = h("h1", { text: "Node", data: { title: "Node" } });
  #facts = h("dl", { class: "facts" });
  #capabilities = h("ul", { class: "capabilities" });
  #sources = h("ul", { class: "sources" });
  #chart = h("figure", { class: "syncs" });
  #conntrack = h("div", { class: "meter" });
  #rules = scroller("Rules by table", h("p", { class: "dim", text: "Nothing yet." }));
  #said = new Map();

  constructor(store) {
    this.#store = store;
    const panel = (id, title, hint, ...body) => h("section", { class: `panel p-${id}`, "aria-labelledby": `node-${id}` }, h("header", null, h("h2", { id: `node-${id}`, text: title }), h("p", { class: "dim small", text: hint })), ...body);
    this.#page.append(this.#title, h("div", { class: "node-grid" },
      panel("facts", "This kproxy", "", this.#facts),
      panel("conntrack", "Connection table", "The kernel remembers every connection here (conntrack). When it is full, new ones are dropped.", this.#conntrack),
      panel("sync", "Syncs", "How long each pass took that brought the kernel to the plan.", this.#chart),
      panel("rules", "What is programmed", "The first packet of a connection meets some of these; kproxy arranges them so that it meets few.", this.#rules),
      panel("capabilities", "What this host can do", "It decides which data planes services can use.", this.#capabilities),
      panel("sources", "Where services come from", "", this.#sources)));
    store.subscribe((changed) => {
      if (this.#shown && (changed.has("node") || changed.has("meta") || changed.has("tick"))) this.#update();
    });
  }

  enter() {
    this.#shown = true;
    this.#page.hidden = false;
    this.#update();
  }

  leave() {
    this.#shown = false;
    this.#page.hidden = true;
  }

  #update() {
    const n = this.#store.node;
    byId("starting").hidden = Boolean(n);
    this.#page.classList.toggle("waiting", !n);
    if (!n) return;
    setText(this.#title, `Node ${n.node}`);
    this.#once("facts", factsOf(n, this.#store.now()), (list) => this.#facts.replaceChildren(...list.map(([k, v]) => h("div", null, h("dt", { text: k }), h("dd", { text: v })))));
    this.#once("capabilities", n.capabilities ?? [], (list) => this.#capabilities.replaceChildren(...[...list].sort((a, b) => a.supported - b.supported).map(capability)));
    this.#once("sources", n.sources ?? [], (list) => this.#sources.replaceChildren(...(list.length > 0 ? list.map(source) : [h("li", { class: "dim", text: "None yet." })])));
    this.#once("conntrack", n.conntrack ?? {}, (c) => this.#conntrack.replaceChildren(...meter(c)));
    this.#once("rules", [n.rules, n.sets, n.virtualServers], () => this.#rules.replaceChildren(rules(n)));
    this.#once("sync", n.sync?.recent ?? [], (list) => this.#chart.replaceChildren(...syncs(list, this.#store.now())));
  }

  // once calls draw only when the value differs from what was drawn before.
  #once(name, value, draw) {
    const text = JSON.stringify(value);
    if (this.#said.get(name) === text) return;
    this.#said.set(name, text);
    draw(value);
  }
}

function factsOf(n, now) {
  return [
    ["Version", `${n.version} (${n.goVersion})`], ["Mode", n.mode], ["Kernel", n.kernel],
    ["Up for", format.duration(n.uptimeSeconds)], ["Heartbeat", !n.alive ? "stopped: the kernel serves alone" : n.exhausted?.length ? `alive, short of ${n.exhausted.join(", ")}` : "alive"],
    ["Last sync", `${format.ago(n.sync?.lastSuccess, now)}, took ${format.seconds(n.sync?.durationSeconds)}`],
    ["Passes that took effect", format.exact(n.sync?.generation)],
    ["Memory", format.bytes(n.memoryBytes)], ["Goroutines", format.exact(n.goroutines)],
  ];
}

// found says what is known of a capability. What kproxy had no reason to look for isn't missing.
export function found(c) {
  if (c.supported) return "available";
  return /^not looked for/.test(c.reason) ? "not looked for" : "missing";
}

function capability(c) {
  const word = found(c);
  return h("li", { data: { yes: word === "not looked for" ? "unasked" : c.supported } }, icon(c.supported ? "i-check" : "i-none"),
    h("div", null, h("b", { text: c.name }), " ", h("span", { class: "yesno", text: word }), " ", h(c.supported ? "span" : "p", { class: "dim small", text: c.supported ? c.reason : sentence(c.reason) })));
}

function source(x) {
  return h("li", { data: { yes: x.synced && !x.error } }, icon(x.error ? "i-warn" : x.synced ? "i-check" : "i-clock"),
    h("div", null, h("b", { text: x.name }), " ", h("span", { class: "yesno", text: x.error ? "has errors" : x.synced ? "read" : "not read yet" }),
      x.error ? h("pre", { text: x.error }) : null));
}

function meter({ count, max }) {
  const share = max > 0 ? count / max : 0;
  const tone = share > 0.9 ? "bad" : share > 0.7 ? "warn" : "";
  const fill = h("span", { class: "fill" });
  fill.style.width = `${Math.min(100, share * 100)}%`;
  return [
    h("p", null, h("span", { class: "big number", text: format.exact(count) }), " ", h("span", { class: "dim", text: `of ${format.exact(max)} entries, ${format.percent(share)}` })),
    h("div", { class: `track ${tone}`, role: "meter", "aria-label": "Entries of the connection table", "aria-valuemin": "0", "aria-valuemax": String(max ?? 0), "aria-valuenow": String(count ?? 0), "aria-valuetext": `${format.exact(count)} of ${format.exact(max)}` }, fill),
    tone ? h("p", { class: "callout " + tone }, icon("i-warn"), h("span", { text: "Raise net.netfilter.nf_conntrack_max, or find out who opens so many connections." })) : null,
  ].filter(Boolean);
}

function rules(n) {
  const families = Object.keys(n.rules ?? {}).sort();
  const tables = [...new Set(families.flatMap((f) => Object.keys(n.rules[f] ?? {})))].sort();
  if (tables.length === 0 && !n.sets && !n.virtualServers) return h("p", { class: "dim", text: "Nothing yet." });
  const row = (name, cells) => h("tr", null, h("th", { scope: "row", text: name }), cells.map((c) => h("td", { class: "end", text: c })));
  return h("table", { class: "data rules-table" },
    h("thead", null, h("tr", null, h("td"), families.map((f) => h("th", { scope: "col", class: "end", text: { ipv4: "IPv4", ipv6: "IPv6" }[f] ?? f })))),
    h("tbody", null, tables.map((t) => row(t === "kproxy" ? "nftables rules, table kproxy" : `iptables rules, table ${t}`, families.map((f) => format.exact(n.rules[f][t] ?? 0)))),
      [[tables.includes("kproxy") ? "Sets and maps" : "Sets (ipset)", n.sets], ["Virtual servers (IPVS)", n.virtualServers]].filter(([, v]) => v > 0).map(([name, v]) => h("tr", null, h("th", { scope: "row", text: name }), h("td", { class: "end", colspan: String(Math.max(1, families.length)), text: format.exact(v) })))));
}

// syncs draws a bar for each of the recent passes, oldest first.
function syncs(recent, now) {
  const list = recent.slice(-60);
  if (list.length === 0) return [h("p", { class: "dim", text: "No pass has taken effect yet." })];
  const longest = Math.max(...list.map((r) => r.durationSeconds));
  const max = ceiling(longest);
  const width = 600, height = 120, slot = width / 60;
  const bars = list.map((r, i) => {
    const tall = Math.max(2, (r.durationSeconds / max) * height);
    const bar = s("rect", { x: (60 - list.length + i) * slot + 1, y: height - tall, width: slot - 2, height: tall, rx: 1.5 });
    bar.append(s("title", { text: `${format.clock(r.time, now)}: ${format.seconds(r.durationSeconds)}` }));
    return bar;
  });
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `The last ${list.length} syncs: the longest took ${format.seconds(longest)}, the latest ${format.seconds(list.at(-1).durationSeconds)}` },
    s("path", { class: "grid", d: `M0 .5H${width}M0 ${height / 2}H${width}M0 ${height - 0.5}H${width}` }), bars);
  return [
    h("div", { class: "plot" }, h("span", { class: "scale number", "aria-hidden": "true" }, h("span", { text: format.seconds(max) }), h("span", { text: format.seconds(max / 2) }), h("span", { text: "0" })), svg),
    h("figcaption", { class: "dim small" }, `${format.plural(list.length, "pass", "passes")} since ${format.clock(list[0].time, now)}; the longest took ${format.seconds(longest)}.`),
  ];
}
