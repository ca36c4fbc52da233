import assert from "node:assert/strict";
import { test } from "node:test";

import { recentClients } from "../ui/lib/clients.js";
import { layout, narrow } from "../ui/lib/layout.js";
import * as path from "../ui/lib/path.js";
import { row } from "./rows.js";

const portal = (outcome) => ({ hook: "PREROUTING", table: "nat", chain: "KPROXY-PORTAL", kind: "rule", text: "-A KPROXY-PORTAL -j DNAT", outcome, packets: 7 });

test("the branch that is taken is the one that the kernel's rules lead to", () => {
  for (const [name, input, want] of [
    ["no trace: as kproxy intends", { row: row("a/b", { dataplane: "userspace" }) }, "userspace"],
    ["no trace, offloaded", { row: row("a/b") }, "kernel"],
    ["no trace, not served", { row: row("a/b", { dataplane: "none" }) }, "none"],
    ["the trace met the listener", { row: row("a/b"), trace: { verdict: "forwarded", steps: [portal("matches"), { hook: "userspace", kind: "listener" }] } }, "userspace"],
    ["the trace met the endpoint's own listener", { row: row("a/b"), trace: { verdict: "forwarded", steps: [portal("no match"), { hook: "INPUT", kind: "listener" }] } }, "kernel"],
    ["kproxy is dead: the kernel, whatever was intended", { row: row("a/b", { dataplane: "userspace" }), trace: { verdict: "forwarded", steps: [portal("no match")] } }, "kernel"],
    ["led away to where nothing is known", { row: row("a/b"), trace: { verdict: "undetermined", culprit: "a rule leads it away", steps: [] } }, "none"],
    ["refused", { row: row("a/b"), trace: { verdict: "refused", steps: [] } }, "none"],
  ]) assert.equal(path.build({ alive: true, service: null, trace: null, ...input }).taken, want, name);
});

test("endpoints are those that the trace knows, joined with their health", () => {
  const p = path.build({ row: row("a/b"), alive: true, service: null, trace: { verdict: "forwarded", steps: [], candidates: [{ endpoint: "10.2.0.2:8080", probability: 1, usable: true, health: "up", packets: 4 }, { endpoint: "10.2.0.3:8080", probability: 0, usable: false, health: "down" }] } });
  assert.deepEqual(p.endpoints.map((e) => [e.address, e.probability, e.usable, e.health]), [["10.2.0.2:8080", 1, true, "up"], ["10.2.0.3:8080", 0, false, "down"]]);
});

test("without a trace usable endpoints share evenly", () => {
  const p = path.build({ row: row("a/b"), alive: true, service: null, trace: null });
  assert.deepEqual(p.endpoints.map((e) => e.probability), [0.5, 0.5]);
});

test("many endpoints are drawn as some and a number", () => {
  const dots = Array.from({ length: 12 }, (_, i) => ({ address: `10.2.0.${i + 2}:80`, health: "up", usable: true }));
  const p = path.build({ row: row("a/b", { dots, endpoints: { total: 40, up: 40, down: 0, unknown: 0, usable: 40 } }), alive: true, service: null, trace: null });
  assert.equal(p.endpoints.length + p.hidden, 40);
  assert.ok(p.endpoints.length < 10);
});

test("the story says what stops a connection", () => {
  const p = path.build({ row: row("a/b", { dataplane: "none", reason: "it has no endpoints" }), alive: true, service: null, trace: null });
  const last = path.story(p).at(-1);
  assert.equal(last.kind, "bad");
  assert.match(last.text, /no endpoints/);
});

test("the story tells a dead kproxy from an offloaded service", () => {
  const told = (alive, trace = null) => path.story(path.build({ row: row("a/b"), alive, service: null, trace })).map((x) => x.text).join(" ");
  assert.match(told(true), /was offloaded/);
  assert.match(told(false), /heartbeat has stopped/);
  const rule = (text, why) => ({ verdict: "forwarded", steps: [{ text, outcome: "no match", why }] });
  const nft = "ip daddr . meta l4proto . th dport @userspace meta l4proto @alive goto redirect";
  assert.match(told(true, rule(nft, "not in set userspace: 10.96.0.10 . tcp . 80")), /was offloaded/);
  assert.match(told(true, rule(nft, "not in set alive: tcp")), /heartbeat has stopped/);
  assert.match(told(true, rule("-m set --match-set KPROXY-ALIVE-4 src -j KPROXY-PORTAL", "not in set KPROXY-ALIVE-4: 10.1.0.2")), /heartbeat has stopped/);
});

test("only of a cluster IP the story says that no machine has it", () => {
  for (const [kind, want] of [["cluster IP", /No machine has this address/], ["node port", /is this node’s/], ["external IP", /10\.1\.0\.1:80\.$/]]) {
    const p = path.build({ row: row("a/b"), alive: true, service: null, trace: { kind, address: "10.1.0.1:80", verdict: "forwarded", steps: [] } });
    assert.match(path.story(p)[0].text, want);
  }
  const p = path.build({ row: row("a/b", { dataplane: "ipvs" }), alive: true, service: null, trace: null });
  assert.match(path.story(p)[0].text, /IPVS needs it on a link/);
});

test("endpoints that don't take a connection are bad news only where they are down", () => {
  const last = (p) => path.story(path.build({ row: row("a/b"), alive: true, service: null, trace: null, ...p })).at(-1);
  const traced = (second) => last({ trace: { verdict: "forwarded", steps: [], candidates: [{ endpoint: "10.2.0.2:8080", probability: 1, usable: true, health: "up" }, { endpoint: "10.2.0.3:8080", probability: 0, usable: false, health: "up", ...second }] } });
  const told = (second) => last({ service: { service: { endpoints: [{ address: "10.2.0.2:8080", health: "up", usable: true, ready: true, weight: 1 }, { address: "10.2.0.3:8080", health: "up", usable: false, ready: true, weight: 1, ...second }] } }, row: row("a/b", { dots: [] }) });
  for (const [name, got, kind, text] of [
    ["all of them", last({}), "good", /^2 of 2 endpoints can take it now, each with a chance of 50%\.$/],
    ["policy Local", traced({ usable: true, why: "is on another node, and the traffic policy is Local" }), "step", /^1 of 2 .* Left out: 10\.2\.0\.3:8080 \(is on another node, and the traffic policy is Local\)\.$/],
    ["affinity", traced({ usable: true }), "good", /^2 of 2 /],
    ["down", traced({ health: "down", why: "its health check fails: connection refused" }), "bad", /refused/],
    ["weight 0, untraced", told({ weight: 0 }), "step", /drains \(weight 0\)/],
    ["terminating, untraced", told({ terminating: true, ready: false }), "step", /\(terminates\)/],
    ["another zone, untraced", told({}), "step", /isn't used from this node/],
    ["ejected, untraced", told({ health: "down", ejected: {}, lastError: "ejected: silent to 4 probes" }), "bad", /\(ejected: silent to 4 probes\)/],
    ["down, untraced", told({ health: "down", lastError: "connection refused" }), "bad", /fails: connection refused/],
  ]) {
    assert.equal(got.kind, kind, name);
    assert.match(got.text, text, name);
  }
});

test("many endpoints with one reason are told together", () => {
  const candidates = [2, 3, 4, 5].map((n) => ({ endpoint: `10.2.0.${n}:80`, usable: n === 2, probability: n === 2 ? 1 : 0, health: "up", why: n === 2 ? "" : "terminates" }));
  const p = path.build({ row: row("a/b"), alive: true, service: null, trace: { address: "10.96.0.10:80", verdict: "forwarded", steps: [], candidates } });
  assert.match(path.story(p).at(-1).text, /Left out: 10\.2\.0\.3:80 and 2 more \(terminates\)\.$/);
});

for (const width of [300, 336, 640, narrow, 900, 1240, 1800]) {
  test(`boxes keep to the picture and apart from each other at ${width} px`, () => {
    for (const n of [0, 1, 3, 8]) {
      const l = layout(width, n);
      const boxes = Object.entries(l.boxes);
      assert.equal(boxes.length, 5 + n);
      for (const [id, b] of boxes) {
        assert.ok(b.x >= 0 && b.y >= 0 && b.w > 60 && b.x + b.w <= width + 0.1 && b.y + b.h <= l.height, `${id} of ${n}: ${JSON.stringify(b)}`);
        for (const [other, c] of boxes) {
          const apart = id === other || b.x + b.w <= c.x || c.x + c.w <= b.x || b.y + b.h <= c.y || c.y + c.h <= b.y;
          assert.ok(apart, `${id} and ${other} of ${n}`);
        }
      }
      for (const [id, e] of Object.entries(l.edges)) assert.doesNotMatch(e.d, /NaN/, id);
    }
  });
}

test("a recent client is one that could reach the address", () => {
  const open = [{ client: "10.1.0.2:4000" }, { client: "10.1.0.3:4000" }, { client: "10.1.0.3:4001" }, { client: "[fd00::5]:4000" }];
  assert.equal(recentClients(open, "10.96.0.10:80")[0], "10.1.0.3");
  assert.equal(recentClients(open, "[fd00:96::1]:80")[0], "fd00::5");
  assert.deepEqual(recentClients([], "10.96.0.10:80"), []);
});
