import assert from "node:assert/strict";
import { test } from "node:test";

import { backoff } from "../ui/lib/backoff.js";
import { Ring } from "../ui/lib/ring.js";
import { area, ceiling, line, peak, thin } from "../ui/lib/spark.js";

test("a ring keeps the latest samples in order", () => {
  const r = new Ring(3);
  assert.deepEqual(r.values(), []);
  for (const x of [1, 2, 3, 4]) r.push(x);
  assert.deepEqual(r.values(), [2, 3, 4]);
  assert.equal(r.length, 3);
});

test("what is missing is filled in, by how long ago it was", () => {
  for (const [name, have, more, want] of [
    ["older ones", [8, 9], [1, 2, 3], [1, 8, 9]],
    ["as far as there is room", [8, 9], [1, 2, 3, 4, 5], [2, 3, 8, 9]],
    ["nothing was there", [], [1, 2], [1, 2]],
    ["nothing more is known", [8, NaN, 9], [], [8, NaN, 9]],
    ["a gap", [7, NaN, NaN, 9], [1, 2, 3, 4], [7, 2, 3, 9]],
    ["of a gap, what is known", [7, NaN, NaN, 9], [3, 4], [7, NaN, 3, 9]],
  ]) {
    const r = new Ring(4);
    for (const x of have) r.push(x);
    r.fill(more);
    assert.deepEqual(r.values(), want, name);
  }
});

test("a line ends at the right edge, and begins there where history is short", () => {
  const box = { width: 100, height: 20, slots: 11, max: 10, pad: 0 };
  assert.equal(line([0, 10], box), "M90 20L100 0");
  assert.equal(line([], box), "");
  assert.equal(area([0, 10], box), "M90 20L100 0L100 20L90 20Z");
});

test("a line has a gap where no sample was taken", () => {
  const box = { width: 100, height: 20, slots: 6, max: 10, pad: 0 };
  assert.equal(line([0, 10, NaN, NaN, 10, 0], box), "M0 20L20 0M80 0L100 20");
  assert.equal(area([0, 10, NaN, NaN, 10, 0], box), "M0 20L20 0L20 20L0 20ZM80 0L100 20L100 20L80 20Z");
  assert.equal(line([NaN, NaN], box), "");
  assert.deepEqual(thin([1, NaN, NaN, NaN], 2), [1, NaN]);
  assert.equal(peak([NaN, 3, NaN, 2]), 3);
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
