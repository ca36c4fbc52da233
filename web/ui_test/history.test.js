import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { History } from "../ui/state/history.js";

// setup makes a history of a kproxy that knows n samples of each service port; later lets time pass.
function setup(t) {
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
  t.after(() => mock.timers.reset());
  const world = { n: 1, down: false, asked: [] };
  globalThis.fetch = async (url) => {
    const keys = new URL(url, "http://x").searchParams.getAll("service");
    world.asked.push(keys);
    if (world.down) throw new Error("refused");
    return { ok: true, json: async () => ({ services: Object.fromEntries(keys.map((k) => [k, { active: Array(world.n).fill(7) }])) }) };
  };
  const store = { link: { state: "live" } };
  world.later = async (ms) => {
    for (let at = 0; at < ms; at += 50) {
      mock.timers.tick(50);
      for (let i = 0; i < 10; i++) await null;
    }
  };
  return { world, store, history: new History(store) };
}

test("what kproxy keeps comes soon after the first look, and anew for as long as one looks", async (t) => {
  const { world, history } = setup(t);
  const seen = [];
  for (let i = 0; i < 10; i++) {
    seen.push(history.track("a/b").active.length);
    world.n++;
    await world.later(1000);
  }
  assert.deepEqual(seen, [0, 2, 2, 2, 2, 6, 6, 6, 6, 10]);
  await world.later(60_000);
  assert.equal(world.asked.length, 3, "nothing is asked for what is not looked at");
  history.track("a/c");
  await world.later(200);
  assert.deepEqual(world.asked.at(-1), ["a/c"]);
  assert.equal(history.track("a/b").active.length, 0, "and it isn't kept");
});

test("while kproxy isn't there what was known stays", async (t) => {
  const { world, store, history } = setup(t);
  history.track("a/b");
  await world.later(200);
  world.down = true;
  await world.later(5000);
  history.track("a/b");
  await world.later(200);
  assert.equal(history.track("a/b").active.length, 1);
  store.link.state = "waiting";
  await world.later(5000);
  const asked = world.asked.length;
  assert.equal(history.track("a/b").active.length, 1);
  await world.later(200);
  assert.equal(world.asked.length, asked, "nothing is asked while the stream is lost");
  world.down = false;
  store.link.state = "live";
  history.track("a/b");
  await world.later(200);
  assert.equal(world.asked.length, asked + 1);
});

test("requests name a bounded number of services", async (t) => {
  const { world, history } = setup(t);
  for (let i = 0; i < 90; i++) history.track(`a/${i}`);
  await world.later(500);
  assert.deepEqual(world.asked.map((keys) => keys.length), [40, 40, 10]);
  assert.equal(history.track("a/89").active.length, 1);
});
