// The real rules: what the trace met in the kernel, as the kernel's own tools
// print it, with counters and in plain words why each step went as it did.

import { h, icon } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { sentence } from "../lib/words.js";

const hooks = {
  PREROUTING: "packets that arrive, before it is decided where they go",
  OUTPUT: "packets that this node sends itself",
  INPUT: "packets for this node’s own programs",
  FORWARD: "packets that go through this node",
  POSTROUTING: "packets that leave, after it is decided where they go",
  routing: "the kernel decides by which link",
  userspace: "kproxy’s process",
  IPVS: "the kernel’s load balancer",
};

// steps makes the list of a trace's steps, grouped by hook, behind those in the client's own network namespace.
export function steps(trace) {
  const own = trace.departure ? [h("details", { class: "leg", open: !trace.steps?.length }, h("summary", { text: `In ${trace.departure.where}: ${format.plural(trace.departure.steps.length, "step")}` }), hooksOf(trace.departure.steps))] : [];
  const legs = [];
  for (const st of trace.steps ?? []) {
    if (legs.length === 0 || (legs.at(-1).leg ?? "") !== (st.leg ?? "")) legs.push({ leg: st.leg, steps: [] });
    legs.at(-1).steps.push(st);
  }
  if (legs.length + own.length === 0) return h("p", { class: "dim", text: "The trace met no rules." });
  // What packets meet on the way to an endpoint is much the same for all of them.
  return h("div", { class: "legs" }, own, legs.map((l) => (l.leg
    ? h("details", { class: "leg" }, h("summary", { text: `${onwards(trace)} ${l.leg}: ${l.steps.length} steps` }), hooksOf(l.steps))
    : hooksOf(l.steps))));
}

// onwards names the way to an endpoint: only in userspace it begins at kproxy.
export function onwards(trace) {
  return trace.steps.some((st) => st.hook === "userspace") ? "On from kproxy to" : "On to";
}

function hooksOf(list) {
  const groups = [];
  for (const st of list) {
    if (groups.at(-1)?.hook !== st.hook) groups.push({ hook: st.hook, steps: [] });
    groups.at(-1).steps.push(st);
  }
  return h("ol", { class: "hooks" }, groups.map((g) => h("li", null,
    h("h3", null, g.hook, " ", h("span", { class: "dim small", text: hooks[g.hook] ?? "" })),
    h("ol", { class: "rules" }, runs(g.steps).map((run) => (run.length > 1 && misses(run[0]) ? folded(run) : run.map(step)))))));
}

// runs cuts steps where one that matches meets one that doesn't.
function runs(list) {
  const out = [];
  for (const st of list) {
    if (out.length > 0 && misses(out.at(-1)[0]) === misses(st)) out.at(-1).push(st);
    else out.push([st]);
  }
  return out;
}

function misses(st) {
  return /^no match/i.test(st.outcome ?? "");
}

// folded shows several rules that don't match as one line that opens.
function folded(run) {
  return h("li", { class: "folded" }, h("details", null, h("summary", { text: `${run.length} rules that don’t match` }), h("ol", { class: "rules" }, run.map(step))));
}

function step(st) {
  const where = [st.table && `table ${st.table}`, st.chain && st.chain !== st.hook && `chain ${st.chain}`, st.kind !== "rule" && st.kind].filter(Boolean).join(", ");
  const passed = st.packets === undefined || st.packets === null ? "" : `${format.exact(st.packets)} packets, ${format.bytes(st.bytes ?? 0)}`;
  return h("li", { data: { no: misses(st) } },
    h("div", { class: "rule-head small" }, h("span", { class: "dim", text: where }), h("span", { class: "number", text: passed })),
    h("code", { text: st.text }),
    h("p", { class: "small" }, st.outcome ? h("b", { text: sentence(st.outcome) + " " }) : null, st.why));
}

// findings makes the list of what the trace found wrong, worst first; null if
// nothing is.
export function findings(trace) {
  const order = { error: 0, warning: 1, note: 2 };
  const list = alike([...(trace.findings ?? [])].filter((f) => !trace.culprit?.includes(f.what)).sort((a, b) => (order[a.severity] ?? 3) - (order[b.severity] ?? 3)));
  const items = list.map((f) => callout({ error: "bad", warning: "warn" }[f.severity] ?? "note", f.what, [f.also > 0 ? `The same at ${f.also} more` : f.where, f.remedy].filter(Boolean).map(sentence).join(" ")));
  for (const m of trace.mismatches ?? []) {
    items.push(callout("bad", `The kernel differs from the plan at ${m.object}`, `planned: ${m.planned || "nothing"}; in the kernel: ${m.kernel || "nothing"}`));
  }
  if (trace.culprit) items.unshift(callout("bad", "What stops it", trace.culprit));
  return items.length > 0 ? h("div", { class: "findings" }, items) : null;
}

// alike leaves one of several findings that have the same remedy, and says of how many more. Pure.
export function alike(findings) {
  const out = [];
  for (const f of findings) {
    const same = f.remedy && out.find((o) => o.remedy === f.remedy && o.severity === f.severity);
    if (same) same.also++;
    else out.push({ ...f, also: 0 });
  }
  return out;
}

function callout(tone, what, more) {
  return h("div", { class: `callout ${tone}` }, icon("i-warn"), h("div", null, h("b", { text: sentence(what) }), " ", sentence(more)));
}
