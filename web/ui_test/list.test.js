import assert from "node:assert/strict";
import { test } from "node:test";

import * as virtual from "../ui/lib/window.js";

test("only rows near the viewport are rendered", () => {
  for (const [box, want] of [
    [{ top: 200, viewport: 800, height: 64, total: 5000 }, { first: 0, end: 16 }],
    [{ top: -64_000, viewport: 800, height: 64, total: 5000 }, { first: 994, end: 1019 }],
    [{ top: -320_000, viewport: 800, height: 64, total: 5000 }, { first: 4994, end: 5000 }],
    [{ top: -900_000, viewport: 800, height: 64, total: 5000 }, { first: 5000, end: 5000 }],
    [{ top: 0, viewport: 800, height: 64, total: 3 }, { first: 0, end: 3 }],
    [{ top: 0, viewport: 800, height: 64, total: 0 }, { first: 0, end: 0 }],
    [{ top: 0, viewport: 800, height: 0, total: 5 }, { first: 0, end: 0 }],
  ]) assert.deepEqual(virtual.visible(box), want, JSON.stringify(box));
});

test("a row that is in view isn't scrolled to, others come just into view", () => {
  const box = { viewport: 800, covered: 100, height: 50 };
  for (const [index, top, want] of [[0, 100, 0], [0, 60, -40], [13, 100, 0], [14, 100, 50], [100, 100, 4350]]) {
    assert.equal(virtual.reveal({ ...box, index, top }), want, `${index} ${top}`);
  }
});

test("keys move within the list", () => {
  for (const [key, from, want] of [
    ["ArrowDown", 0, 1], ["ArrowDown", 99, 99], ["ArrowUp", 0, 0], ["PageDown", 0, 10], ["PageDown", 95, 99], ["PageUp", 5, 0],
    ["Home", 50, 0], ["End", 50, 99], ["x", 5, undefined],
  ]) assert.equal(virtual.move(key, from, 100, 10), want, `${key} from ${from}`);
  assert.equal(virtual.move("Home", -1, 0, 10), undefined);
});

test("a page is what fits, less one", () => {
  assert.equal(virtual.page({ viewport: 800, covered: 100, height: 50 }), 13);
  assert.equal(virtual.page({ viewport: 100, covered: 90, height: 50 }), 1);
});
