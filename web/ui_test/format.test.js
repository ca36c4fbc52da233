import assert from "node:assert/strict";
import { test } from "node:test";

import * as format from "../ui/lib/format.js";

const table = (name, f, rows) => test(name, () => {
  for (const [args, want] of rows) assert.equal(f(...[args].flat()), want, JSON.stringify(args));
});

table("count is brief", format.count, [[0, "0"], [950, "950"], [999, "999"], [1000, "1.0k"], [9949, "9.9k"], [34_400, "34k"], [999_949, "1.0M"], [5.6e6, "5.6M"], [2e9, "2.0G"], [undefined, "–"]]);
table("exact is in groups", format.exact, [[0, "0"], [5000, "5,000"], [undefined, "–"]]);
table("rate keeps small ones visible", format.rate, [[0, "0"], [0.01, "<0.1"], [0.4, "0.4"], [1, "1"], [9.94, "9.9"], [12.4, "12"], [3400, "3.4k"]]);
table("bytes count in powers of 1024", format.bytes, [[0, "0 B"], [812, "812 B"], [1024, "1.0 KiB"], [1023.6, "1.0 KiB"], [5 << 20, "5.0 MiB"], [20e9, "19 GiB"]]);
table("percent rounds, but never to nothing", format.percent, [[0, "0%"], [0.004, "<1%"], [1 / 3, "33.3%"], [0.5, "50%"], [1, "100%"]]);
table("seconds choose the unit", format.seconds, [[0.0004, "0.4 ms"], [0.012, "12 ms"], [0.5, "500 ms"], [1.5, "1.5 s"], [75, "1 min 15 s"]]);
table("duration has two units", format.duration, [[0, "0 s"], [4.4, "4 s"], [60, "1 min"], [200, "3 min 20 s"], [7500, "2 h 5 min"], [3601, "1 h"], [90_000, "1 d 1 h"], [-5, "0 s"]]);

test("ago and countdown go by the clock they are given", () => {
  const now = Date.parse("2026-01-01T12:00:00Z");
  assert.equal(format.ago("2026-01-01T11:59:59Z", now), "just now");
  assert.equal(format.ago("2026-01-01T11:57:00Z", now), "3 min ago");
  assert.equal(format.ago("0001-01-01T00:00:00Z", now), "never");
  assert.equal(format.countdown("2026-01-01T12:00:07.2Z", now), "8 s");
  assert.equal(format.countdown("2026-01-01T12:00:00Z", now), "");
  assert.equal(format.countdown(undefined, now), "");
});

test("clock says the date of another day", () => {
  const at = (text) => new Date(text).toISOString(); // of a time in the reader's zone
  const now = Date.parse(at("2026-01-02T00:10:00"));
  assert.equal(format.clock(at("2026-01-02T00:09:07"), now), "00:09:07");
  assert.equal(format.clock(at("2026-01-01T23:59:59"), now), "2026-01-01 23:59:59");
  assert.equal(format.clock(at("2025-01-02T00:09:07"), now), "2025-01-02 00:09:07");
  assert.equal(format.clock("0001-01-01T00:00:00Z", now), "–");
});

test("plural", () => {
  assert.equal(format.plural(1, "endpoint"), "1 endpoint");
  assert.equal(format.plural(5000, "endpoint"), "5,000 endpoints");
  assert.equal(format.plural(2, "pass", "passes"), "2 passes");
});
