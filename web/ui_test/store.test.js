import assert from "node:assert/strict";
import { test } from "node:test";

import { Store } from "../ui/state/store.js";

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
