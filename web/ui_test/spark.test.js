import assert from "node:assert/strict";
import { test } from "node:test";

import { backoff } from "../ui/lib/backoff.js";
import { area, ceiling, line, peak, thin } from "../ui/lib/spark.js";

test("a line ends at the right edge, and begins there where history is short", () => {
  const box = { width: 100, height: 20, slots: 11, max: 10, pad: 0 };
  assert.equal(line([0, 10], box), "M90 20L100 0");
  assert.equal(line([], box), "");
  assert.equal(area([0, 10], box), "M90 20L100 0L100 20L90 20Z");
});

test("thin keeps peaks", () => {
  assert.deepEqual(thin([0, 0, 9, 0, 0, 1], 2), [9, 1]);
  assert.deepEqual(thin([1, 2], 5), [1, 2]);
});

test("a scale ends at a round number", () => {
  for (const [max, want] of [[0, 1], [1, 1], [1.2, 2], [34, 50], [51, 100], [0.003, 0.005]]) assert.ok(Math.abs(ceiling(max) - want) < 1e-9, `${max}`);
});

test("attempts come soon, then every ten seconds or so", () => {
  assert.equal(backoff(0, 0.5), 500);
  assert.equal(backoff(3, 0.5), 4000);
  assert.equal(backoff(40, 1), 12_000);
});
