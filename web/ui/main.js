// The dashboard's entry: makes the one store, opens the stream, and shows the page
// that the address names. The store knows no views, views know no stream; what they
// share is the store.

import { byId, setAttr } from "./lib/dom.js";
import * as route from "./lib/route.js";
import { Announcer } from "./shell/announce.js";
import { Header } from "./shell/header.js";
import { fillLegend } from "./shell/legend.js";
import { keys } from "./shell/keys.js";
import { theme } from "./shell/theme.js";
import { get } from "./state/api.js";
import { History } from "./state/history.js";
import { Store } from "./state/store.js";
import { Stream } from "./state/stream.js";
import { NodePage } from "./views/node.js";
import { Overview } from "./views/overview.js";
import { ServicePage } from "./views/service.js";
import { look } from "./views/timeline.js";

const store = new Store();
const stream = new Stream(store);
const history = new History(store);
const announcer = new Announcer();
const pages = { overview: new Overview(store, history), service: new ServicePage(store, history), node: new NodePage(store) };
let current = "";
let grafana = ""; // its address

function go() {
  const to = route.parse(location.hash);
  const came = current;
  if (current && (current !== to.page || to.page === "service")) pages[current].leave();
  current = to.page;
  if (came !== to.page || to.page === "service") scrollTo(0, 0);
  pages[current].enter(to);
  setAttr(byId("nav-overview"), "aria-current", current === "overview" ? "page" : null);
  setAttr(byId("nav-node"), "aria-current", current === "node" ? "page" : null);
  store.tick(); // the title
  linkGrafana();
  if (came === "") return;
  // A change of page is announced by moving the focus, as a browser does.
  if (current === "overview" && came === "service") pages.overview.focus();
  else if (came !== current || current === "service") byId("main").focus({ preventScroll: true });
}

function announce() {
  let seen = null;
  let linked = true;
  store.subscribe((changed) => {
    if (changed.has("timeline")) {
      const latest = store.events[0];
      // What happened before the page was opened isn't announced.
      if (seen !== null && latest && latest !== seen && Date.parse(latest.time) > store.now() - 10_000) {
        announcer.say(`${latest.service ?? ""}: ${look(latest)[2]}. ${latest.message}`);
      }
      seen = latest ?? seen;
    }
    if (changed.has("link") && store.link.state !== "paused") {
      const live = store.link.state === "live";
      if (store.loaded && live !== linked) announcer.say(live ? "Live again." : "The connection to kproxy was lost.");
      if (store.loaded) linked = live;
    }
    if (seen === null && store.loaded) seen = store.events[0] ?? {};
  });
}

// linkGrafana has the footer lead to what Grafana has of what is shown, if kproxy was told where that is.
function linkGrafana() {
  byId("grafana").hidden = grafana === "";
  if (grafana !== "") setAttr(byId("grafana"), "href", route.grafana(grafana, store.meta.node, route.parse(location.hash).key));
}

async function askGrafana() {
  try {
    grafana = (await get("/configz"))["kproxy.dev"].grafanaURL ?? "";
  } catch {
    return; // all that is missing is a link
  }
  linkGrafana();
  store.subscribe((changed) => {
    if (changed.has("meta")) linkGrafana();
  });
}

theme();
fillLegend();
askGrafana();
new Header(store, () => stream.retry());
keys({
  search() {
    if (current !== "overview") location.hash = "#/";
    requestAnimationFrame(() => pages.overview.search());
  },
  list() {
    return current === "overview" && pages.overview.focus();
  },
  back(event) {
    // Where the address already leads: a key may come before the page has changed.
    if (route.parse(location.hash).page === "overview") {
      pages.overview.clear();
      // The next key is no part of what is searched for.
      if (event.target.closest("input, select") && !pages.overview.focus()) byId("main").focus({ preventScroll: true });
    } else if (!event.target.closest("input")) location.hash = "#/";
  },
});
byId("skip").addEventListener("click", (e) => {
  e.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", go);
announce();
go();
stream.start();
setInterval(() => {
  if (!document.hidden) store.tick();
}, 1000);
