import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { Stream } from "../ui/state/stream.js";

const minute = 60_000;

// setup starts a stream of a page that is in sight, or hidden.
function setup(t, hidden = false) {
  mock.timers.enable({ apis: ["setTimeout", "setInterval", "Date"], now: 1_000_000 });
  t.after(() => mock.timers.reset());
  const seen = [];
  globalThis.addEventListener = () => {};
  globalThis.document = { hidden, addEventListener: (_, f) => seen.push(f) };
  globalThis.fetch = async () => ({ ok: true, json: async () => ({ events: [] }) });
  const sources = [];
  globalThis.EventSource = class {
    open = true;
    #listeners = {};
    constructor() {
      sources.push(this);
    }
    addEventListener(name, f) {
      this.#listeners[name] = f;
    }
    close() {
      this.open = false;
    }
    emit(name, data) {
      this.#listeners[name]({ data: JSON.stringify(data ?? {}) });
    }
  };
  const said = [];
  const store = {
    link: { state: "connecting", error: "" }, overview() {}, past() {},
    linked(state, { error = "" } = {}) {
      store.link = { state, error };
      if (state !== said.at(-1)) said.push(state);
    },
  };
  new Stream(store).start();
  return {
    sources, said,
    open: () => sources.filter((s) => s.open).length,
    hide(is) {
      globalThis.document.hidden = is;
      for (const f of seen) f();
    },
  };
}

test("a page that was hidden for a minute pauses, and goes on when it is shown", (t) => {
  const p = setup(t);
  p.sources[0].emit("overview");
  p.hide(true);
  mock.timers.tick(minute - 1);
  assert.equal(p.open(), 1);
  mock.timers.tick(1);
  assert.equal(p.open(), 0);
  mock.timers.tick(60 * minute);
  assert.equal(p.sources.length, 1, "nothing is tried while it is paused");
  p.hide(false);
  assert.equal(p.open(), 1);
  p.sources[1].emit("overview");
  assert.deepEqual(p.said, ["connecting", "live", "paused", "live"]);
});

test("a short look elsewhere changes nothing", (t) => {
  const p = setup(t);
  p.sources[0].emit("overview");
  for (let i = 0; i < 5; i++) {
    p.hide(true);
    mock.timers.tick(minute / 2);
    p.hide(false);
    mock.timers.tick(minute / 2);
  }
  assert.equal(p.sources.length, 1);
  assert.deepEqual(p.said, ["connecting", "live"]);
});

test("a page that was opened in the background pauses as well", (t) => {
  const p = setup(t, true);
  mock.timers.tick(minute);
  assert.equal(p.open(), 0);
  assert.equal(p.said.at(-1), "paused");
});

test("attempts end with a pause, and a failure after it is told", (t) => {
  const p = setup(t);
  p.sources[0].emit("overview");
  p.sources[0].emit("error");
  p.hide(true);
  mock.timers.tick(minute);
  const tried = p.sources.length;
  mock.timers.tick(10 * minute);
  assert.equal(p.sources.length, tried);
  assert.equal(p.said.at(-1), "paused");
  p.hide(false);
  assert.equal(p.said.at(-1), "paused");
  p.sources.at(-1).emit("error");
  assert.equal(p.said.at(-1), "waiting");
});
