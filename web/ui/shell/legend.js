// The legend in the help dialog: what the icons stand for.

import { byId, h, icon } from "../lib/dom.js";
import * as words from "../lib/words.js";
import { pill } from "../views/parts.js";

export function fillLegend() {
  for (const name of words.planeOrder) {
    const p = pill();
    p.show(name);
    byId("help-planes").append(h("dt", null, p.el), h("dd", { text: words.capital(words.plane(name).brief) + "." }));
  }
  const healths = [["h-up", "up", "Up: its health check succeeds, and it takes connections."], ["h-mended", "up", "Up again: it was down in the last 15 minutes."], ["h-idle", "up", "Up, but takes no new connections: not ready, draining, or elsewhere by policy."], ["h-down", "down", "Down: its health check fails, or it is ejected because clients and probes found it dead."], ["h-unknown", "unknown", "Unknown: not checked, or not yet."]];
  for (const [id, health, text] of healths) {
    const mark = icon(id);
    mark.classList.add("dot");
    mark.dataset.health = health;
    byId("help-health").append(h("dt", null, mark), h("dd", { text }));
  }
}
