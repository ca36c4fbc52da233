import assert from "node:assert/strict";
import { test } from "node:test";

import * as path from "../ui/lib/path.js";
import { recentClients } from "../ui/lib/clients.js";
import { matrix } from "../ui/views/clients.js";
import { alike } from "../ui/views/rules.js";
import { row } from "./rows.js";

const talk = (client, endpoint, connections, refused = 0) => ({ client, endpoint, connections, refused, bytesIn: 1, bytesOut: 2 });

test("who talks to whom has a row for each client and a column for each endpoint that took one", () => {
  const m = matrix([talk("10.1.0.2", "10.2.0.3:80", 4), talk("10.1.0.3", "10.2.0.2:80", 9), talk("10.1.0.2", "10.2.0.2:80", 1), talk("10.1.0.3", "10.2.0.9:80", 0, 2)]);
  assert.deepEqual(m.endpoints, ["10.2.0.2:80", "10.2.0.3:80"]);
  assert.deepEqual(m.clients.map((c) => [c.client, c.total, c.refused, c.bytes, [...c.cells.values()]]), [["10.1.0.3", 9, 2, 6, [9]], ["10.1.0.2", 5, 0, 6, [4, 1]]]);
  assert.equal(m.most, 9);
});

test("clients that were there are offered, those with most connections first", () => {
  const from = (...list) => list.map((client) => ({ client }));
  assert.deepEqual(recentClients(from("10.1.0.2:1", "10.1.0.3:1", "10.1.0.3:2", "[fd00::1]:5"), "10.96.0.1:80"), ["10.1.0.3", "10.1.0.2"]);
});

test("the drawing counts the connections of the client that it follows", () => {
  const talks = [talk("10.1.0.2", "10.2.0.2:8080", 4), talk("10.1.0.9", "10.2.0.2:8080", 7)];
  const p = path.build({ row: row("a/b"), alive: true, service: null, talks, trace: { from: "10.1.0.2", verdict: "forwarded", steps: [] } });
  assert.deepEqual(p.endpoints.map((e) => e.own), [4, undefined]);
});

test("findings with one remedy are said once", () => {
  const finding = (where) => ({ severity: "error", what: `nothing listens at ${where}`, where, remedy: "look whether the program runs" });
  assert.deepEqual(alike([finding("a"), finding("b"), finding("c"), { severity: "note", what: "x" }]).map((f) => [f.where, f.also]), [["a", 2], [undefined, 0]]);
});
