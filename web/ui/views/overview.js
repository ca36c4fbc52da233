// The overview: the verdict, totals, search, the list of all service ports, and recent
// events beside it. What is searched for is in the page's address.

import { byId, h, setText } from "../lib/dom.js";
import { csv } from "../lib/csv.js";
import * as filters from "../lib/filter.js";
import * as format from "../lib/format.js";
import * as route from "../lib/route.js";
import { sentence } from "../lib/words.js";
import { get } from "../state/api.js";
import * as clients from "./clients.js";
import { CurvePanel } from "./curve.js";
import { Filters } from "./filters.js";
import { List } from "./list.js";
import { scroller } from "./parts.js";
import { Timeline } from "./timeline.js";
import { Totals } from "./totals.js";
import { Verdict } from "./verdict.js";

// settle is how many milliseconds an order by figures stays as it is, so that
// rows don't change places under the pointer every second.
const settle = 4_000;

// every is how many milliseconds apart kproxy is asked for those that were refused.
const every = 4_000;

export class Overview {
  #store;
  #page = byId("page-overview");
  #filter = filters.fromQuery(new URLSearchParams());
  #totals = new Totals((plane) => this.#change({ plane: this.#filter.plane === plane ? "" : plane }));
  #verdict = new Verdict((condition) => this.#change({ condition: this.#filter.condition === condition ? "" : condition }));
  #filters = new Filters((fields) => this.#change(fields), () => this.#save());
  #timeline = new Timeline({ most: 60, named: true });
  #latest = h("span", { class: "latest small" });
  #refusedAt = 0;
  #refusedLast = h("span", { class: "latest small" });
  #refusedList = scroller("Refused and dropped");
  #refused = h("details", { class: "panel recent refused-panel", hidden: true }, h("summary", null, h("h2", { text: "Refused and dropped" }), this.#refusedLast), this.#refusedList);
  #count = h("p", { class: "shown dim small", role: "status" });
  #empty = h("div", { class: "empty" });
  #events = h("details", { class: "panel recent" }, h("summary", null, h("h2", { text: "Recent changes" }), this.#latest), scroller("Recent changes", this.#timeline.el), h("p", { class: "dim small none-yet", text: "Nothing has changed since kproxy began to keep events. Offloads, recalls and endpoints that go down or come back are listed here." }));
  #list;
  #curve;
  #selected = [];
  #sortedAt = 0;
  #scroll = 0;
  #shown = false;

  constructor(store, history) {
    this.#store = store;
    this.#list = new List(history, (sort) => this.#change({ sort }));
    this.#curve = new CurvePanel(store);
    const main = h("section", { class: "services", "aria-label": "Services" }, this.#filters.el, this.#count, this.#list.el, this.#empty);
    const aside = h("aside", { "aria-label": "Recent changes" }, this.#events);
    const beside = h("div", { class: "beside" }, main);
    this.#page.append(h("h1", { class: "sr", text: "Services" }), this.#verdict.el, this.#totals.el, this.#curve.el, this.#refused, beside);
    const wide = matchMedia("(min-width: 100rem)"), narrow = matchMedia("(max-width: 50rem)");
    // Where it is to be seen it is in the document as well, so that Tab comes by in order.
    const place = () => {
      this.#events.open = wide.matches;
      if (wide.matches || narrow.matches) beside.append(aside);
      else beside.prepend(aside);
      if (narrow.matches) this.#page.append(this.#curve.el, this.#refused); // services come first
      else beside.before(this.#curve.el, this.#refused);
    };
    wide.addEventListener("change", place);
    narrow.addEventListener("change", place);
    this.#curve.el.open = matchMedia("(min-width: 60rem) and (min-height: 40rem)").matches; // elsewhere services come first
    place();
    store.subscribe((changed) => {
      if (this.#shown) this.#update(changed);
    });
  }

  // enter shows the page with the filters of its address.
  enter({ query }) {
    this.#filter = filters.fromQuery(query);
    this.#shown = true;
    this.#page.hidden = false;
    this.#sortedAt = 0;
    this.#update(new Set(["rows", "timeline"]));
    if (this.#scroll > 0) scrollTo({ top: this.#scroll, behavior: "instant" });
  }

  leave() {
    this.#scroll = scrollY;
    this.#shown = false;
    this.#page.hidden = true;
  }

  // clear empties the search; false if there was nothing to clear.
  clear() {
    if (filters.isEmpty(this.#filter)) return false;
    this.#change({ q: "", plane: "", state: "", condition: "" });
    return true;
  }

  search() {
    this.#filters.focus();
  }

  // focus returns to the row that was opened, or begins with the first; false if there
  // is none.
  focus() {
    return this.#list.focus();
  }

  #change(fields) {
    Object.assign(this.#filter, fields);
    const address = route.withQuery("#/", this.#filter);
    history.replaceState(null, "", address);
    this.#sortedAt = 0;
    this.#update(new Set(["rows"]));
  }

  #update(changed) {
    const now = this.#store.now();
    if (changed.has("timeline") || changed.has("tick")) {
      this.#timeline.show(this.#store.events, now);
      const [last] = this.#store.events;
      setText(this.#latest, last ? `${format.ago(last.time, now)}: ${last.service ?? ""}, ${last.message}` : "none yet");
      this.#events.classList.toggle("quiet", this.#store.events.length === 0);
    }
    if (changed.has("tick")) {
      this.#curve.tick();
      this.#askRefused();
    }
    if (changed.has("rows")) this.#rows(now);
    else if (changed.has("tick")) this.#list.tick(now);
  }

  #rows(now) {
    const { rows, loaded } = this.#store;
    byId("starting").hidden = loaded;
    this.#page.classList.toggle("waiting", !loaded);
    if (!loaded) return;
    this.#verdict.show(this.#store.meta.verdict, this.#filter.condition);
    this.#totals.show(rows, this.#filter.plane);
    const empty = filters.isEmpty(this.#filter);
    this.#filters.show(this.#filter, empty, rows);
    this.#select(rows);
    setText(this.#count, empty ? format.plural(rows.length, "service port") : `${format.exact(this.#selected.length)} of ${format.plural(rows.length, "service port")}`);
    this.#list.el.hidden = this.#selected.length === 0;
    this.#list.show(this.#selected, this.#filter, now);
    this.#explainEmpty(rows.length);
  }

  // askRefused shows the last connections that no endpoint took, if there are any.
  async #askRefused() {
    if (document.hidden || Date.now() - this.#refusedAt < every) return;
    this.#refusedAt = Date.now();
    try {
      const { refused: list } = await get("/api/v1/refused");
      const now = this.#store.now();
      this.#refused.hidden = list.length === 0;
      if (list.length === 0) return;
      const [last] = list;
      setText(this.#refusedLast, `${format.ago(last.time, now)}: ${last.client} at ${last.service || last.address}, ${sentence(last.refused)}`);
      if (!this.#refusedList.contains(document.activeElement)) this.#refusedList.replaceChildren(clients.refused(list, now, true));
    } catch {
      // The header says that kproxy doesn't answer.
    }
  }

  // save has the browser save what the list shows.
  #save() {
    const url = URL.createObjectURL(new Blob([csv(this.#selected)], { type: "text/csv" }));
    h("a", { href: url, download: `kproxy-${this.#store.meta.node}.csv` }).click();
    URL.revokeObjectURL(url);
  }

  // select keeps an order by figures for a while, and only brings its rows up to date.
  #select(rows) {
    if (this.#filter.sort !== "name" && Date.now() - this.#sortedAt < settle) {
      const found = filters.select(rows, { ...this.#filter, sort: "name" });
      const place = new Map(this.#selected.map((r, i) => [r.key, i]));
      this.#selected = found.sort((a, b) => (place.get(a.key) ?? Infinity) - (place.get(b.key) ?? Infinity) || filters.byKey(a, b));
      return;
    }
    this.#sortedAt = Date.now();
    this.#selected = filters.select(rows, this.#filter);
  }

  #explainEmpty(total) {
    const kind = this.#selected.length > 0 ? "" : total === 0 ? "none" : "filtered";
    this.#empty.hidden = kind === "";
    if (this.#empty.dataset.kind === kind) return;
    this.#empty.dataset.kind = kind;
    if (kind === "filtered") {
      this.#empty.replaceChildren(h("b", { text: "No service port matches." }), h("button", { type: "button", class: "tool", text: "Clear search and filters", on: { click: () => this.clear() } }));
    } else if (kind === "none") {
      this.#empty.replaceChildren(h("b", { text: "There are no services yet." }),
        h("p", null, "With manifests: put a Service and its EndpointSlice as YAML into a directory that kproxy was given with ", h("code", { text: "--manifests" }), "; it appears here within a second. With Kubernetes: create a Service. ", h("a", { href: "#/node", text: "The node’s page" }), " shows which sources kproxy reads, and their errors."));
    }
  }
}
