import assert from "node:assert/strict";
import { test } from "node:test";

import { steps } from "../ui/views/rules.js";

// element is as much of a document's as is asked for here.
function element(tag) {
  const el = { tag, children: [], dataset: {}, text: "", setAttribute: (name, value) => (el[name] = value), append: (c) => el.children.push(c) };
  Object.defineProperty(el, "textContent", { get: () => el.text + el.children.map((c) => c.textContent ?? c).join(" "), set: (text) => (el.text = text) });
  return el;
}

test("a pod's own rules stand before the node's, and alone where they stop the packet", (t) => {
  globalThis.document = { createElement: element, createElementNS: (_, tag) => element(tag) };
  t.after(() => delete globalThis.document);
  const rule = (text) => ({ hook: "OUTPUT", table: "filter", chain: "OUTPUT", kind: "rule", text, outcome: "matches: accept" });
  const departure = { where: "network namespace /run/netns/pod, where the client is", verdict: "leaves", steps: [rule("-A OUTPUT -j ACCEPT")] };
  const both = steps({ departure, steps: [{ ...rule("-A PREROUTING -j KPROXY-SERVICES"), hook: "PREROUTING" }] });
  assert.match(both.textContent, /^In network namespace \/run\/netns\/pod, where the client is: 1 step .*-A OUTPUT -j ACCEPT.*PREROUTING.*KPROXY-SERVICES/);
  assert.equal(both.children[0].open, undefined);
  const stopped = steps({ departure: { ...departure, verdict: "dropped" }, steps: [] });
  assert.match(stopped.textContent, /-A OUTPUT -j ACCEPT/);
  assert.equal(stopped.children[0].open, "");
  assert.match(steps({ steps: [] }).textContent, /met no rules/);
});
