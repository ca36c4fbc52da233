// The way of a connection to a service port, as a value: what the diagram draws and
// what the sentences below it say. Pure. It is made from a live row, and from
// a trace (read back from the kernel) as soon as there is one.

import { family, host } from "./clients.js";
import * as format from "./format.js";
import * as words from "./words.js";

// most is how many endpoints are drawn; the rest is one box.
const most = 8;

// build returns the path. row is the service port's live row; trace the answer of
// /api/v1/trace or null; service that of /api/v1/service or null; talks who has talked to whom;
// alive whether the heartbeat holds.
export function build({ row, trace, service, talks = [], alive }) {
  const taken = branch(row, trace);
  const beneath = kernelPlane(row, service);
  const address = trace?.address ?? row.addresses[0] ?? (row.nodePort ? `node:${row.nodePort}` : "");
  const hook = trace?.steps?.find((s) => s.hook === "PREROUTING" || s.hook === "OUTPUT")?.hook ?? "PREROUTING";
  const path = {
    taken, beneath, address, hook, kind: trace?.kind || "cluster IP", protocol: row.protocol, algorithm: row.algorithm.replaceAll("-", " "),
    client: { who: trace?.client || "any client", from: trace?.from || "" },
    alive: aliveIn(trace, alive), inSet: taken === "userspace" || (row.dataplane === "userspace" && taken !== "none"),
    userspaceOnly: beneath === "none",
    chain: chainOf(trace), scheduler: service?.service?.scheduler ?? "",
    newPerSecond: row.rates.connections, bytesPerSecond: row.rates.bytesIn + row.rates.bytesOut, active: row.connections.active,
    packets: packets(trace),
    masquerade: trace?.masquerade ?? null,
    verdict: trace?.verdict ?? (row.dataplane === "none" ? "refused" : "forwarded"),
    culprit: trace?.culprit ?? "", reason: row.reason,
    ...endpoints(row, trace, service, family(host(address)), talks.filter((t) => t.client === trace?.from)),
  };
  return path;
}

// branch says which way new connections go: by what the trace met in the kernel,
// else by what kproxy intends.
function branch(row, trace) {
  const verdict = trace?.verdict;
  if (verdict === "undetermined" && trace.culprit) return "none";
  if (verdict === "refused" || verdict === "dropped" || verdict === "not a service") return "none";
  if (trace?.steps?.length) {
    if (trace.steps.some((s) => s.hook === "userspace")) return "userspace"; // other listeners are endpoints' own
    if (verdict === "forwarded") return "kernel";
  }
  if (row.dataplane === "none") return "none";
  return row.dataplane === "userspace" ? "userspace" : "kernel";
}

function kernelPlane(row, service) {
  if (words.kernelPlanes.includes(row.dataplane)) return row.dataplane;
  return service?.service?.beneath || "none";
}

// aliveIn prefers what the kernel's set said to what kproxy believes. nftables doesn't ask it of an
// address that isn't in the userspace set.
function aliveIn(trace, alive) {
  const step = trace?.steps?.find((s) => s.text?.includes("KPROXY-ALIVE") || s.text?.includes("@alive "));
  if (!step || step.why?.includes("set userspace")) return alive;
  return !/^no match/i.test(step.outcome ?? "");
}

function chainOf(trace) {
  const step = trace?.steps?.findLast?.((s) => /^KPROXY-SVC-/.test(s.chain ?? "") || / map @backends\b/.test(s.text ?? ""));
  return step?.chain ?? "";
}

// packets finds the counters that stand on the diagram's edges; undefined where
// the kernel keeps none.
function packets(trace) {
  const steps = trace?.steps ?? [];
  const of = (test) => steps.find(test)?.packets ?? undefined;
  return {
    hook: of((s) => (s.hook === "PREROUTING" || s.hook === "OUTPUT") && s.table === "nat" && s.text?.includes("-j KPROXY-SERVICES")),
    userspace: of((s) => s.chain === "KPROXY-PORTAL" && s.text?.includes("DNAT") && /^match/i.test(s.outcome ?? "")),
    kernel: of((s) => s.kind === "virtual server" || (s.text?.includes("-j KPROXY-SVC-") && /^match/i.test(s.outcome ?? ""))),
  };
}

// endpoints joins what is known of each endpoint: health and use from the service,
// probability and counters from the trace, or only the row's dots. A connection
// stays in its address' family, so that only endpoints of family fam count.
function endpoints(row, trace, service, fam, talks) {
  const known = new Map();
  for (const d of row.dots) known.set(d.address, { address: d.address, health: d.health, usable: d.usable });
  for (const e of service?.service?.endpoints ?? []) {
    known.set(e.address, { ...known.get(e.address), address: e.address, node: e.node, health: e.health, usable: e.usable, active: e.activeConnections, why: idleness(e) });
  }
  for (const d of row.dots) Object.assign(known.get(d.address), { health: d.health, usable: d.usable });
  for (const c of trace?.candidates ?? []) {
    known.set(c.endpoint, { ...known.get(c.endpoint), address: c.endpoint, usable: takes(c), health: c.health || known.get(c.endpoint)?.health || "unknown", probability: c.probability, why: c.why, packets: c.packets });
  }
  for (const t of talks) if (known.has(t.endpoint)) known.get(t.endpoint).own = t.connections;
  const every = [...known.values()];
  const all = every.filter((e) => family(host(e.address)) === fam);
  const usable = all.filter((e) => e.usable).length;
  for (const e of all) if (e.probability === undefined && !trace && usable > 0) e.probability = e.usable ? 1 / usable : 0;
  all.sort((a, b) => Number(b.usable) - Number(a.usable));
  // Rows name only some of many endpoints; those of the other family can't be counted then.
  const complete = every.length >= row.endpoints.total;
  const total = complete ? all.length : row.endpoints.total;
  const shown = total > most ? all.slice(0, most - 1) : all;
  return { endpoints: shown, all, hidden: total - shown.length, usable: complete ? usable : row.endpoints.usable, total, down: complete ? all.filter((e) => e.health === "down").length : row.endpoints.down };
}

// takes reports whether a trace's candidate may get the connection. One that is
// usable may still not be for this client: a traffic policy, say, keeps it out. With
// session affinity the others have no chance either, but nothing speaks against them.
function takes(c) {
  return c.usable && !(c.why && c.probability === 0);
}

// idleness says why an endpoint gets no new connections, in the words of a trace;
// empty if it does.
function idleness(e) {
  if (e.usable) return "";
  if (e.ejected) return e.lastError;
  if (e.health === "down") return e.lastError ? `its health check fails: ${e.lastError}` : "its health check fails";
  if (e.terminating) return "terminates";
  if (e.ready === false) return "isn't ready";
  return e.weight === 0 ? "drains (weight 0)" : "isn't used from this node";
}

// shape names what decides the diagram's boxes and lines; while it stays the same,
// only texts change.
export function shape(path) {
  return [path.taken, path.beneath, path.alive, path.verdict, path.masquerade?.yes, path.hidden > 0, ...path.endpoints.map((e) => `${e.address} ${e.health} ${e.usable}`)].join("|");
}

// stands is what is remarkable about an address, by its kind.
const stands = {
  "cluster IP": ". No machine has this address: it stands for the service.",
  "node port": ". The address is this node’s, the port stands for the service.",
};

// ends is the step that something stops, which the page says before the story.
const ends = "It gets no further: what stops it stands above.";

// story tells the path in sentences, in order: {text, kind} where kind is "step",
// "good" or "bad".
export function story(p) {
  const out = [];
  const add = (text, kind = "step") => out.push({ text, kind });
  const who = p.client.from ? `${p.client.from} (${p.client.who})` : words.capital(p.client.who);
  add(`${who} opens a ${p.protocol} connection to ${p.address}${(p.kind === "cluster IP" && words.plane(p.beneath).clusterIP) || stands[p.kind] || "."}`);
  add(p.hook === "OUTPUT"
    ? "Its first packet leaves this node, so the kernel shows it to the rules at OUTPUT, where kproxy’s are."
    : "Its first packet arrives at this node, so the kernel shows it to the rules at PREROUTING, where kproxy’s are.");
  if (p.taken === "none") {
    add(p.culprit ? ends : `No endpoint can take it: ${words.sentence(p.reason)}`, "bad");
    return out;
  }
  add(question(p));
  add(carries(p));
  if (p.masquerade) add(source(p.masquerade));
  // That some don't is mostly meant: a traffic policy, zones, a pod that ends. Down isn't.
  add(`${p.usable} of ${format.plural(p.total, "endpoint")} can take it now${spread(p)}.${others(p)}`, p.down > 0 ? "bad" : p.usable === p.total ? "good" : "step");
  if (p.culprit) add(ends, "bad");
  return out;
}

function question(p) {
  if (p.taken === "userspace") return "The rules ask two things: is kproxy alive, and is this address in the userspace set? Twice yes, so the connection is redirected to kproxy.";
  if (!p.alive) return "The rules ask whether kproxy is alive. Its heartbeat has stopped, so the packet goes on to the kernel’s own rules: the service outlives its proxy.";
  return "The rules ask two things: is kproxy alive, and is this address in the userspace set? It isn’t in the set, since the service was offloaded. The packet goes on to the kernel’s own rules.";
}

function carries(p) {
  if (p.taken === "userspace") return `kproxy accepts the connection, picks an endpoint (${p.algorithm}), connects to it, and relays the bytes. If the endpoint doesn’t answer, it tries another one.`;
  return (words.plane(p.beneath).carries ?? words.planes.iptables.carries)(p);
}

function source(m) {
  const why = m.reason ? ` Why: ${words.sentence(m.reason)}` : "";
  if (m.yes) return `The endpoint sees this node’s address${m.source ? ` ${m.source}` : ""} instead of the client’s (masquerade).${why}`;
  return `The endpoint sees the client’s own address.${why}`;
}

// others says why endpoints don't take it, those with one reason together.
function others(p) {
  const by = new Map();
  for (const e of p.all) {
    if (e.usable) continue;
    const why = e.why || (e.health === "down" ? "its health check fails" : "gets no new connections");
    by.set(why, [...(by.get(why) ?? []), e.address]);
  }
  if (by.size === 0) return "";
  return ` Left out: ${[...by].map(([why, of]) => `${of[0]}${of.length > 1 ? ` and ${of.length - 1} more` : ""} (${why})`).join("; ")}.`;
}

function spread(p) {
  const given = p.endpoints.filter((e) => e.probability > 0).map((e) => e.probability);
  if (given.length < 2) return "";
  const even = given.every((x) => Math.abs(x - given[0]) < 0.005);
  return even ? `, each with a chance of ${format.percent(given[0])}` : `, with chances from ${format.percent(Math.min(...given))} to ${format.percent(Math.max(...given))}`;
}
