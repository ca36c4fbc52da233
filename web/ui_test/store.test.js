import assert from "node:assert/strict";
import { test } from "node:test";

import { Store } from "../ui/state/store.js";

test("views are called once a frame, with all that changed, however many events came", () => {
  const frames = [];
  globalThis.requestAnimationFrame = (f) => frames.push(f);
  const store = new Store(), calls = [];
  store.subscribe((changed) => calls.push([...changed].sort()));
  for (let i = 0; i < 200; i++) {
    store.event({ time: new Date(i).toISOString(), kind: "health", service: "a/b", message: `10.0.0.1:80 is down: ${i}` });
    store.update({ changed: [{ key: "a/b" }] });
  }
  store.tick();
  assert.equal(frames.length, 1);
  frames.pop()();
  assert.deepEqual(calls, [["rows", "tick", "timeline"]]);
  store.tick();
  assert.equal(frames.length, 1);
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

test("how kproxy is, besides, is told by an overview and by the node's figures", () => {
  globalThis.requestAnimationFrame = () => {};
  const store = new Store();
  store.overview({ services: [], notReady: "kproxy is still setting up", drain: null, warnings: ["a"] });
  assert.equal(store.meta.notReady, "kproxy is still setting up");
  store.figures({ notReady: "", drain: { since: "2026-11-24T12:00:00Z", left: 3 }, warnings: ["b"] });
  assert.deepEqual([store.meta.notReady, store.meta.drain.left, store.meta.warnings], ["", 3, ["b"]]);
});
