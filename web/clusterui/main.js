// The dashboard of all nodes: asks for a summary and what the page of the address shows, every few seconds.

import { byId, h, icon, setAttr, setText } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";
import { theme } from "../ui/shell/theme.js";
import { get } from "../ui/state/api.js";
import { Flows } from "./flows.js";
import { NodePage, Nodes } from "./nodes.js";
import * as route from "./route.js";
import { ServicePage } from "./service.js";
import { Services } from "./services.js";

const every = 5_000;
const makers = { services: Services, service: ServicePage, nodes: Nodes, node: NodePage, flows: Flows };
const pages = {};
let current = "", asking = null, timer = 0, said = "";

// lines shows the verdict: each line leads to what it is about.
function lines(verdict) {
  const text = JSON.stringify(verdict);
  if (text === said) return;
  const focus = byId("verdict").contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  const symbols = { bad: "i-stop", warn: "i-warn", good: "i-check", note: "h-unknown" };
  byId("verdict").replaceChildren(...verdict.map((l) => h("a", { class: l.tone, href: route.to(l.page, l.page === "nodes" ? { state: l.filter } : { class: l.filter }) }, icon(symbols[l.tone] ?? "i-warn"), h("span", { text: l.text }))));
  if (focus) [...byId("verdict").children].find((a) => a.getAttribute("href") === focus)?.focus();
  if (said !== "") setText(byId("live-region"), verdict[0].text);
  said = text;
}

async function refresh() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  const to = route.parse(location.hash);
  const page = (pages[to.page] ??= new makers[to.page]());
  try {
    const summary = await get("api/v1/summary", {}, mine.signal);
    lines(summary.verdict);
    setText(byId("chip-size"), `${format.plural(summary.nodes, "node")}, ${format.plural(summary.services, "service port")}`);
    setText(byId("chip-age"), summary.oldest ? `each asked every ${format.duration(summary.intervalSeconds)}; oldest answer ${format.ago(summary.oldest, Date.parse(summary.time))}` : "no node has answered yet");
    if (current !== to.page) {
      byId("page").replaceChildren(...page.el);
      if (current !== "") byId("main").focus({ preventScroll: true });
      current = to.page;
    }
    for (const [id, of] of [["nav-services", ["services", "service"]], ["nav-nodes", ["nodes", "node"]], ["nav-flows", ["flows"]]]) setAttr(byId(id), "aria-current", of.includes(to.page) ? "page" : null);
    await page.refresh(to, summary, mine.signal);
    byId("starting").hidden = true;
    link("");
    const heading = document.querySelector("#page h1").textContent;
    document.title = `${to.page === "services" ? summary.verdict[0].text : heading} · kproxy`;
  } catch (e) {
    if (e.name === "AbortError") return;
    if (!e.status) byId("starting").hidden = false;
    link(e.status === undefined ? String(e) : e.status === 0 ? "The dashboard doesn’t answer: kubectl kproxy ui, or the port forward to it, has ended" : e.message);
    if (e.status === undefined) console.error(e);
  }
  if (asking === mine) timer = setTimeout(refresh, document.hidden ? 4 * every : every);
}

// link says what went wrong with the last question; empty for nothing.
function link(trouble) {
  setAttr(byId("chip-link"), "data-tone", trouble ? "bad" : "good");
  setText(byId("chip-link"), trouble || "live");
  if (!trouble) return;
  setText(byId("starting"), trouble);
  byId("starting").hidden = false;
  document.title = `${trouble} · kproxy`;
}

theme();
byId("skip").addEventListener("click", (e) => {
  e.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", refresh);
addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(refresh, 300);
});
document.addEventListener("visibilitychange", () => document.hidden || refresh());
refresh();
