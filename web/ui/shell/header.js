// The header: which node and mode, whether kproxy is alive and in sync, and
// whether what is shown is live. Banners below it say plainly what is wrong and
// what to do.

import { byId, h, icon, setAttr, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { capital, sentence } from "../lib/words.js";

export class Header {
  #store;
  #retry;
  #shown = "";

  constructor(store, retry) {
    this.#store = store;
    this.#retry = retry;
    store.subscribe((changed) => {
      if (changed.has("meta") || changed.has("link") || changed.has("tick")) this.#show();
    });
    document.addEventListener("visibilitychange", () => this.#title());
  }

  #show() {
    const { meta, link, loaded } = this.#store;
    setText(byId("head-node"), meta.node || "…");
    setText(byId("head-mode"), meta.mode || "…");
    this.#title();
    const live = link.state === "live";
    chip(byId("chip-alive"), !loaded || link.state === "paused" ? ["", "i-heart", "…"] : !live ? ["warn", "i-heart", "heartbeat not known"] : !meta.alive ? ["bad", "i-warn", "not alive"] : meta.exhausted.length > 0 ? ["bad", "i-warn", `exhausted: ${meta.exhausted.join(", ")}`] : ["good", "i-heart", "alive"]);
    chip(byId("chip-sync"), this.#sync(meta));
    chip(byId("chip-live"), connection(link, loaded));
    this.#banners();
  }

  // title has the browser's tab say the verdict or which page it is. A hidden page isn't kept up to date.
  #title() {
    const { meta, link, loaded } = this.#store, seen = loaded && !document.hidden;
    const heading = document.querySelector(".page:not([hidden]) h1");
    const verdict = seen && !byId("page-overview").hidden ? capital(meta.verdict[0]?.text) : "";
    document.title = [seen && link.state !== "live" ? "Not live" : verdict || (heading?.dataset.title ?? heading?.textContent), "kproxy", meta.node].filter(Boolean).join(" · ");
  }

  #sync(meta) {
    if (!meta.sync) return ["", "i-sync", "…"];
    if (meta.sync.lastError) return ["bad", "i-warn", "sync failed"];
    if (!format.isSet(meta.sync.lastSuccess)) return ["warn", "i-sync", "no sync yet"];
    // However long ago: kproxy syncs when there is something to do.
    return ["", "i-sync", `synced ${format.ago(meta.sync.lastSuccess, this.#store.now())}`];
  }

  // banners are rebuilt only when what they say changes, so that a button in them
  // keeps the focus.
  #banners() {
    const list = problems(this.#store, this.#store.now());
    const said = list.map((p) => p.tone + p.title + p.text).join("\n");
    if (said === this.#shown) return;
    this.#shown = said;
    byId("banners").replaceChildren(...list.map((p) => h("div", { class: `banner ${p.tone}`, role: "status" },
      icon("i-warn"), h("div", null, h("b", { text: p.title }), " ", p.text),
      p.retry ? h("button", { type: "button", class: "tool", text: "Try now", on: { click: this.#retry } }) : null,
      p.href ? h("a", { href: p.href, text: "See the node" }) : null)));
  }
}

// problems returns what the banners say.
export function problems({ meta, link, loaded, firstVersion }, now) {
  const out = [];
  if (meta.version !== (firstVersion || meta.version)) {
    out.push({ tone: "note", title: `kproxy is version ${meta.version} now.`, text: `This page is that of ${firstVersion}; load it again when it suits you.` });
  }
  if (link.state !== "live" && link.error) {
    const starting = /starting/.test(link.error);
    if (starting) out.push({ tone: "note", title: "kproxy is starting.", text: "The page shows its services as soon as it knows them." });
    else if (loaded) out.push({ tone: "bad", title: "Not live.", text: `What you see may be out of date: ${link.error}. The kernel goes on serving connections without kproxy. If it was stopped, start it again; if this page came through a port forward, renew that.`, retry: true });
    else out.push({ tone: "bad", title: "No connection to kproxy:", text: `${link.error}. See whether it runs (kproxy status on the node), and whether this page’s address is still its --metrics-bind-address.`, retry: true });
  }
  if (link.state === "live" && loaded && !meta.alive) {
    out.push({ tone: "bad", title: "kproxy isn’t alive.", text: "Its heartbeat in the kernel has stopped, so new connections go by the kernel’s rules. Look at its log.", href: "#/node" });
  }
  if (link.state === "live" && loaded && meta.alive && meta.exhausted.length > 0) {
    out.push({ tone: "bad", title: `kproxy is short of ${meta.exhausted.join(" and ")}.`, text: "New clients wait or are refused, and connections of who holds most end for them. kproxy_userspace_shed_total counts these; the log names the client.", href: "#/node" });
  }
  if (link.state === "live" && loaded && meta.alive && meta.notReady) out.push({ tone: "warn", title: "kproxy isn’t ready:", text: sentence(meta.notReady), href: "#/node" });
  if (meta.drain) out.push({ tone: "note", title: `This node is drained since ${format.clock(meta.drain.since, now)}.`, text: "Load balancers are told to leave it out, and new connections go to the kernel where it can take them. kproxy drain --undo ends it." });
  for (const w of meta.warnings) out.push({ tone: "warn", title: "A warning:", text: sentence(w) });
  if (meta.sync?.lastError) out.push({ tone: "bad", title: "The last sync failed:", text: `${meta.sync.lastError}. What was programmed before stays in force.`, href: "#/node" });
  const broken = (meta.sources ?? []).filter((s) => s.error);
  if (broken.length > 0) {
    out.push({ tone: "warn", title: `A source has errors: ${broken.map((s) => s.name).join(", ")}.`, text: "What was last valid stays in force.", href: "#/node" });
  }
  return out;
}

// connection says how live what is shown is.
function connection({ state, until }, loaded) {
  if (state === "live") return ["good", "h-up", "live"];
  if (state === "paused") return ["", "i-clock", "paused"];
  if (state === "connecting") return ["warn", "i-sync", loaded ? "reconnecting" : "connecting"];
  return ["bad", "i-clock", `again in ${format.duration(Math.max(0, Math.ceil((until - Date.now()) / 1000)))}`];
}

function chip(el, [tone, id, text]) {
  setAttr(el, "data-tone", tone || null);
  if (el.dataset.icon !== id) {
    el.dataset.icon = id;
    el.replaceChildren(icon(id), h("span"));
  }
  setText(el.lastChild, text);
}
