import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { History } from "../ui/state/history.js";
import { row } from "./rows.js";

// setup makes a history of one service port with a sample every two seconds; tick is a
// second of a page in sight, with n connections active; known is what kproxy answers.
function setup() {
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
  let shown = () => {};
  globalThis.document = { hidden: false, addEventListener: (_, f) => (shown = f) };
  const world = { known: [], asked: 0 };
  globalThis.fetch = async () => {
    world.asked++;
    return { ok: true, json: async () => ({ services: { "a/b": { active: world.known } } }) };
  };
  let hear;
  const store = { meta: { intervalSeconds: 2 }, link: { state: "live" }, row: () => row("a/b", { connections: { active: world.active } }), subscribe: (f) => (hear = f) };
  const history = new History(store);
  return {
    world, shown: () => shown(),
    active: () => history.track("a/b").active.values(),
    link(state) {
      store.link.state = state;
      hear(new Set(["link"]));
    },
    tick(n, ms = 1000) {
      world.active = n;
      mock.timers.tick(ms);
      hear(new Set(["tick"]));
    },
    // asks lets the history ask kproxy, and take the answer.
    async asks() {
      mock.timers.tick(200);
      for (let i = 0; i < 10; i++) await null;
    },
  };
}

test("while the stream is lost nothing is sampled, and the time isn't left out", async (t) => {
  t.after(() => mock.timers.reset());
  const h = setup();
  assert.deepEqual(h.active(), []);
  await h.asks();
  for (const n of [1, 1, 2, 2, 3]) h.tick(n);
  assert.deepEqual(h.active(), [1, 2, 3]);
  h.link("waiting");
  for (let i = 0; i < 6; i++) h.tick(9);
  h.link("live");
  h.tick(4);
  h.tick(4);
  assert.deepEqual(h.active(), [1, 2, 3, NaN, NaN, 4, 4]);

  h.world.known = [5, 6, 7, 8]; // it wasn't restarted, and knows what was
  await h.asks();
  assert.equal(h.world.asked, 2);
  assert.deepEqual(h.active(), [1, 2, 3, 5, 6, 4, 4]);
});

test("a machine that slept leaves a gap, a late tick doesn't", async (t) => {
  t.after(() => mock.timers.reset());
  const h = setup();
  h.active();
  await h.asks();
  h.tick(1);
  h.tick(2, 3900);
  assert.deepEqual(h.active(), [1, 2, 2]);
  h.tick(3, 8100);
  assert.deepEqual(h.active(), [1, 2, 2, NaN, NaN, NaN, 3]);
  h.tick(4, 3_600_000);
  assert.equal(h.active().length, 150);
  assert.deepEqual(h.active().filter((x) => !Number.isNaN(x)), [4]);
});

test("a page that is shown again begins anew, with what kproxy knows", async (t) => {
  t.after(() => mock.timers.reset());
  const h = setup();
  h.active();
  await h.asks();
  h.tick(1);
  h.world.known = [7, 8, 9];
  h.shown();
  h.tick(2, 600_000);
  h.active();
  await h.asks();
  assert.deepEqual(h.active(), [7, 8, 9]);
  h.tick(5, 2000);
  assert.deepEqual(h.active(), [7, 8, 9, 5]);
});
