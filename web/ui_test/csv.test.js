import assert from "node:assert/strict";
import { test } from "node:test";

import { csv } from "../ui/lib/csv.js";
import { row } from "./rows.js";

test("what would break a line, or be a formula, is quoted", () => {
  const [head, line, end] = csv([row("shop/web:http", { reason: '=1+1, "so"' })]).split("\r\n");
  assert.equal(head.split(",").slice(0, 3).join(), "namespace,service,port");
  assert.match(line, /^shop,web,http,TCP,10\.96\.0\.10:80,iptables,offloaded,fine,"'=1\+1, ""so""",2,/);
  assert.equal(end, "");
});
