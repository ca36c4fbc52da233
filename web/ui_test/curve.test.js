import assert from "node:assert/strict";
import { test } from "node:test";

import { marks, point } from "../ui/views/curve.js";

const curve = { stepSeconds: 20, begin: "2026-01-01T00:00:00Z", planes: { nftables: { new: [1, 2], failed: [0, 1], retried: [0, 0] }, userspace: { new: [3, 0], failed: [0, 2], retried: [4, 0] } } };

test("a point has the rates of each data plane, and sums of what failed", () => {
  const { time, planes, failed, retried } = point(curve, 1);
  assert.deepEqual([new Date(time).toISOString(), planes, failed, retried], ["2026-01-01T00:00:20.000Z", [["userspace", 0], ["nftables", 2]], 3, 0]);
});

test("moves and changes of health are marked at their step, nothing else", () => {
  const e = (time, message, move) => ({ time: `2026-01-01T00:00:${time}Z`, service: "a/b", message, move, kind: move ? "dataplane" : "health" });
  const events = [e("39", "10.2.0.2:80 is down: refused"), e("20", "userspace to nftables: qualified", "offload"), e("10", "none to userspace: added", "other"), e("05", "10.2.0.2:80 is up"), e("01", "x", "recall"), e("45", "y", "recall")];
  assert.deepEqual(marks(curve, 2, events).map((m) => [m.event.message, m.at]), [["10.2.0.2:80 is down: refused", 1], ["userspace to nftables: qualified", 1], ["10.2.0.2:80 is up", 0], ["x", 0]]);
});
