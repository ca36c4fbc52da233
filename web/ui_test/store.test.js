import assert from "node:assert/strict";
import { test } from "node:test";

import { Store } from "../ui/state/store.js";
import { row } from "./rows.js";

test("what a change doesn't tell of a row stays as it was", () => {
  globalThis.requestAnimationFrame = () => {};
  const store = new Store();
  const of = () => store.row("a/b").others;
  store.overview({ services: [row("a/b", { others: ["10.2.0.99:80"] })] });
  store.update({ changed: [row("a/b", { reason: "another" })] });
  assert.equal(store.row("a/b").reason, "another");
  assert.deepEqual(of(), ["10.2.0.99:80"]);
  store.update({ changed: [row("a/b", { others: [] })] });
  assert.deepEqual(of(), []);
  store.update({ removed: ["a/b"] });
  store.update({ changed: [row("a/b")] });
  assert.equal(of(), undefined);
});

test("what is short is told by an overview, an update and the node's figures", () => {
  globalThis.requestAnimationFrame = () => {};
  const store = new Store();
  store.overview({ services: [], exhausted: ["descriptors"] });
  assert.deepEqual(store.meta.exhausted, ["descriptors"]);
  store.update({});
  assert.deepEqual(store.meta.exhausted, ["descriptors"]);
  store.update({ exhausted: [] });
  assert.deepEqual(store.meta.exhausted, []);
  store.figures({ exhausted: ["memory"] });
  assert.deepEqual(store.meta.exhausted, ["memory"]);
});
