import assert from "node:assert/strict";
import { test } from "node:test";

import { downs, lately, recent } from "../ui/lib/health.js";
import { outages, segments, span } from "../ui/views/endpoints.js";

const at = (ms) => new Date(ms).toISOString();
const health = (ms, service, message) => ({ time: at(ms), kind: "health", service, message });

test("endpoints that were down are remembered by service port", () => {
  const now = Date.parse("2026-01-01T12:00:00Z");
  const all = downs([
    health(now - 1000, "a/b", "10.2.0.2:80 is up"),
    health(now - 5000, "a/b", "10.2.0.2:80 is down: connect: connection refused"),
    health(now - 9000, "a/b", "10.2.0.2:80 is down"),
    health(now - lately - 1, "a/b", "[fd00::2]:80 is down"),
    health(now - 5000, "a/c", "10.2.0.9:80 is down"),
    { time: at(now), kind: "dataplane", service: "a/b", message: "10.2.0.3:80 is down" },
  ]);
  assert.deepEqual([...all.get("a/b").keys()], ["10.2.0.2:80", "[fd00::2]:80"]);
  assert.deepEqual([...recent(all.get("a/b"), now)], [["10.2.0.2:80", { times: 2, last: now - 5000 }]]);
  assert.equal(recent(undefined, now).size, 0);
});

test("a strip of health begins where history does, and ends now", () => {
  const now = Date.parse("2026-01-01T12:00:00Z");
  const change = (share, health) => ({ time: at(now - span * (1 - share)), health });
  const cut = (list) => segments(list, now).map((s) => [Math.round(s.from * 100), Math.round(s.to * 100), s.health]);
  assert.deepEqual(cut([]), []);
  assert.deepEqual(cut([change(0.5, "up")]), [[50, 100, "up"]]);
  assert.deepEqual(cut([change(-3, "unknown"), change(-2, "up"), change(0.2, "down"), change(0.3, "up")]), [[0, 20, "up"], [20, 30, "down"], [30, 100, "up"]]);
});

test("outages are summed up, with what failed", () => {
  const now = Date.parse("2026-01-01T12:00:00Z");
  const change = (secondsAgo, health, error = "") => ({ time: at(now - secondsAgo * 1000), health, error });
  for (const [changes, want] of [
    [[change(5000, "up")], { times: 0, total: 0, errors: [] }],
    [[change(5000, "down", "connect: connection refused"), change(4000, "up")], { times: 0, total: 0, errors: [] }], // before the strip
    [[change(1000, "down", "no answer within 1s"), change(890, "up")], { times: 1, total: 10_000, errors: ["timeout"] }], // half of it
    [[change(100, "down", "connect: connection refused"), change(98, "up"), change(40, "down", "read: connection reset by peer"), change(30, "up"), change(5, "down", "status 500")], { times: 3, total: 17_000, errors: ["refused", "reset", "other error"] }],
    [[change(9, "down", "ejected: silent to 4 probes after unanswered SYNs of 3 clients"), change(6, "unknown")], { times: 1, total: 3000, errors: ["silent"] }],
    [[change(9, "down", "connect: no route to host"), change(6, "up"), change(3, "down", "connect: network is unreachable")], { times: 2, total: 6000, errors: ["unreachable"] }],
  ]) assert.deepEqual(outages(changes, now), want);
});
