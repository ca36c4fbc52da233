import assert from "node:assert/strict";
import { test } from "node:test";

import * as filter from "../ui/lib/filter.js";
import * as route from "../ui/lib/route.js";
import { row } from "./rows.js";

const rows = [
  row("default/api", { dataplane: "ipvs", addresses: ["10.96.0.20:443"] }),
  row("shop/cart:http", { dataplane: "userspace", state: "qualifying", reason: "waiting for its first connection", connections: { active: 9, failed: 0, retried: 3, total: 9 } }),
  row("shop/dead", { dataplane: "none", state: "rejecting", condition: "unanswered", endpoints: { total: 1, up: 0, down: 1, unknown: 0, usable: 0 }, dots: [] }),
  row("shop/web:http", { nodePort: 30080, others: ["10.2.9.77:8080", "[fd00:2::4d]:8080"], connections: { active: 50, failed: 1, retried: 0, total: 70 } }),
];
const none = filter.fromQuery(new URLSearchParams());
const keys = (f) => filter.select(rows, { ...none, sort: "name", ...f }).map((r) => r.key);

test("select", () => {
  const all = rows.map((r) => r.key);
  for (const [f, want] of [
    [{}, all],
    [{ q: "  " }, all],
    [{ q: "shop http" }, ["shop/cart:http", "shop/web:http"]],
    [{ q: "10.96.0.20" }, ["default/api"]],
    [{ q: ":30080" }, ["shop/web:http"]],
    [{ q: "10.2.0.3" }, ["default/api", "shop/cart:http", "shop/web:http"]],
    [{ q: "10.2.9.77" }, ["shop/web:http"]],
    [{ q: "web FD00:2::4d" }, ["shop/web:http"]],
    [{ q: "FIRST connection" }, ["shop/cart:http"]],
    [{ q: "nothing like it" }, []],
    [{ plane: "ipvs" }, ["default/api"]],
    [{ state: "rejecting" }, ["shop/dead"]],
    [{ condition: "unanswered" }, ["shop/dead"]],
    [{ condition: "fine" }, ["default/api", "shop/cart:http", "shop/web:http"]],
    [{ sort: "" }, ["shop/dead", "default/api", "shop/cart:http", "shop/web:http"]],
    [{ sort: "active" }, ["shop/web:http", "shop/cart:http", "default/api", "shop/dead"]],
    [{ sort: "errors" }, ["shop/cart:http", "shop/web:http", "default/api", "shop/dead"]],
    [{ sort: "active", plane: "userspace" }, ["shop/cart:http"]],
  ]) assert.deepEqual(keys(f), want, JSON.stringify(f));
});

test("select leaves its argument in order", () => {
  const before = [...rows];
  filter.select(rows, { ...none, sort: "active" });
  assert.deepEqual(rows, before);
});

test("a filter survives its address", () => {
  const f = { q: "web & co", plane: "ipvs", state: "offloaded", condition: "down", sort: "rate", hide: "why,rate" };
  assert.deepEqual(filter.fromQuery(route.parse(route.withQuery("#/", f)).query), f);
  assert.equal(route.withQuery("#/", none), "#/");
});

test("what an address can't mean is left out", () => {
  assert.deepEqual(filter.fromQuery(new URLSearchParams("condition=toString&sort=__proto__")), none);
});

test("a page's address is read and written", () => {
  for (const [hash, want] of [
    ["", { page: "overview", key: "" }],
    ["#/", { page: "overview", key: "" }],
    ["#/node", { page: "node", key: "" }],
    ["#/service/shop/web:http", { page: "service", key: "shop/web:http" }],
    ["#/service/shop/we%2Fb?from=10.0.0.1", { page: "service", key: "shop/we/b" }],
    ["#/service/shop", { page: "overview", key: "" }],
    ["#/service/shop/%E0%A4%A", { page: "service", key: "shop/%E0%A4%A" }],
  ]) {
    const { page, key } = route.parse(hash);
    assert.deepEqual({ page, key }, want, hash);
  }
  assert.equal(route.service("shop/web:http"), "#/service/shop/web:http");
  assert.equal(route.parse(route.service("a b/c?d#e")).key, "a b/c?d#e");
});

test("Grafana's dashboard is shown for the node, and the Service of a service port", () => {
  assert.equal(route.grafana("https://g.example/", "node-1", ""), "https://g.example/d/kproxy?var-instance=node-1");
  assert.equal(route.grafana("http://g:3000/x", "node-1", "shop/web:http"), "http://g:3000/x/d/kproxy?var-instance=node-1&var-namespace=shop&var-service=web");
});
