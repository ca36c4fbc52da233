import assert from "node:assert/strict";
import { test } from "node:test";

import * as words from "../ui/lib/words.js";
import { found } from "../ui/views/node.js";
import { onwards } from "../ui/views/rules.js";
import { look } from "../ui/views/timeline.js";

test("reasons become sentences, names of programs stay as they are spelt", () => {
  for (const [text, want] of [
    ["", ""], ["its only endpoint isn't ready", "Its only endpoint isn't ready."], ["kproxy is dead", "kproxy is dead."],
    ["10.2.0.3:80 refused a connection; again after 10s", "10.2.0.3:80 refused a connection; again after 10s."],
    ["rp_filter is strict", "rp_filter is strict."], ["iptables to userspace: x", "iptables to userspace: x."], ["Done!", "Done!"],
  ]) assert.equal(words.sentence(text), want);
});

test("every data plane and state has a word and an icon", () => {
  for (const p of [...Object.values(words.planes), ...Object.values(words.states), ...Object.values(words.healths)]) assert.ok(p.label && p.icon, JSON.stringify(p));
  assert.deepEqual(Object.keys(words.planes), words.planeOrder);
  assert.equal(words.plane("ebpf").label, "ebpf");
});

test("the costs of the generations can be compared row by row", () => {
  const [first, ...others] = words.planeOrder.filter((n) => n !== "none").map((n) => words.plane(n).costs.map((c) => c.what));
  for (const o of others) assert.deepEqual(o, first);
});

test("that userspace bridges an update of the kernel's rules is no recall", () => {
  for (const message of ["iptables to userspace: kernel rules are being updated", "userspace to iptables: qualified"]) {
    assert.deepEqual(look({ kind: "dataplane", message, move: "catch-up" }).slice(1), ["", "Catching up"], message);
  }
});

test("what wasn't looked for isn't missing", () => {
  for (const [c, want] of [
    [{ supported: true, reason: "user 0 has it" }, "available"],
    [{ supported: false, reason: "not looked for in mode iptables" }, "not looked for"],
    [{ supported: false, reason: "the module ip_vs isn't there" }, "missing"],
  ]) assert.equal(found(c), want);
});

test("only in userspace is kproxy on the way to an endpoint", () => {
  assert.equal(onwards({ steps: [{ kind: "rule" }, { hook: "userspace", kind: "listener" }] }), "On from kproxy to");
  assert.equal(onwards({ steps: [{ kind: "rule" }, { kind: "route", leg: "10.2.0.2:80" }, { hook: "INPUT", kind: "listener", leg: "10.2.0.2:80" }] }), "On to");
});

test("events are told apart by which move they are, else by what they say", () => {
  for (const [kind, message, want, move] of [
    ["dataplane", "userspace to iptables: qualified", "Offloaded", "offload"],
    ["dataplane", "ipvs to userspace: 10.2.0.2:80 refused a connection; again after 10s", "Recalled", "recall"],
    ["dataplane", "recalled: kernel rules could not be written", "Recalled"],
    ["dataplane", "none to ipvs: qualified", "Served by IPVS"],
    ["dataplane", "none to iptables: only the kernel can serve SCTP", "Served by iptables"],
    ["dataplane", "none to userspace: waiting for its first connection", "Served in userspace"],
    ["dataplane", "iptables to ipvs: qualified", "Served by IPVS"],
    ["dataplane", "userspace to none: it has no endpoints", "Not served"],
    ["dataplane", "iptables to none: it has no endpoints", "Not served"],
    ["dataplane", "added, userspace: waiting for its first connection", "Data plane"],
    ["dataplane", "added, none: nothing leads to none of it", "Data plane"],
    ["health", "10.2.0.2:80 is down: connection refused", "Endpoint down"],
    ["health", "10.2.0.2:80 is up", "Endpoint up"],
    ["sync", "sync failed: x", "Sync"],
  ]) assert.equal(look({ kind, message, move })[2], want, message);
});
