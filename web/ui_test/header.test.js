import assert from "node:assert/strict";
import { test } from "node:test";

import { problems } from "../ui/shell/header.js";
import { Store } from "../ui/state/store.js";

test("banners say what kproxy status says of the node", () => {
  globalThis.requestAnimationFrame = () => {};
  const store = new Store(), now = Date.parse("2026-11-24T13:00:00Z");
  store.overview({ services: [], alive: true });
  store.linked("live");
  assert.deepEqual(problems(store, now), []);
  store.figures({ notReady: "rules aren't written yet", drain: { since: "2026-11-24T12:00:00Z", left: 3 }, warnings: ["kube-proxy runs here, too"] });
  const said = problems(store, now).map((p) => `${p.tone} ${p.title} ${p.text}`);
  assert.equal(said.length, 3);
  assert.match(said[0], /^warn kproxy isn’t ready: Rules aren't written yet\.$/);
  assert.match(said[1], /^note This node is drained since .*:00:00\. /);
  assert.match(said[2], /^warn A warning: kube-proxy runs here, too\.$/);
});
