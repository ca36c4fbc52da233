// A service port's endpoints as a table, each with the last minutes of its health
// as a strip: full height is up, a notch at the lower edge is down, a thin line
// is unknown, so that it reads without colour.

import { h, icon, s } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { capital, health } from "../lib/words.js";
import { healthIcon, labelled } from "./parts.js";

// span is how many milliseconds a strip shows.
export const span = 15 * 60_000;

// segments cuts the time from now-span to now by the changes of health, which are
// in order: [{from, to, health}] as shares of the span. Before the first change
// nothing is known. Pure.
export function segments(changes, now) {
  const out = [];
  const begin = now - span;
  const at = (t) => Math.min(1, Math.max(0, (t - begin) / span));
  changes.forEach((c, i) => {
    const from = at(Date.parse(c.time)), to = at(i + 1 < changes.length ? Date.parse(changes[i + 1].time) : now);
    if (to > from) out.push({ from, to, health: c.health });
  });
  return out;
}

// classes are what failed checks say, in a word each.
const classes = [[/^ejected: silent/, "silent"], [/refused/, "refused"], [/no answer within|timed out/, "timeout"], [/reset/, "reset"], [/unreachable|no route/, "unreachable"]];

// outages sums up how often an endpoint was down in the span that ends now, for how many
// milliseconds in all, and with which classes of error. Pure.
export function outages(changes, now) {
  const out = { times: 0, total: 0, errors: [] };
  changes.forEach((c, i) => {
    const end = i + 1 < changes.length ? Date.parse(changes[i + 1].time) : now;
    const took = end - Math.max(Date.parse(c.time), now - span);
    if (c.health !== "down" || took <= 0) return;
    out.times++;
    out.total += took;
    const error = classes.find(([re]) => re.test(c.error ?? ""))?.[1] ?? (c.error ? "other error" : "");
    if (error && !out.errors.includes(error)) out.errors.push(error);
  });
  return out;
}

// table makes the table of a /api/v1/service answer.
export function table(answer, path, connects, now) {
  if (answer.service.endpoints.length === 0) return h("p", { class: "dim", text: "It has none." });
  const history = new Map((answer.health ?? []).map((x) => [x.address, x.changes ?? []]));
  const took = new Map(connects.map((c) => [c.endpoint, c]));
  const chance = new Map(path.all.map((e) => [e.address, e.probability]));
  const head = (text, end) => h("th", { scope: "col", class: end ? "end" : null, text });
  return h("div", null, labelled(h("table", { class: "data endpoints-table" },
    h("thead", null, h("tr", null, head("Endpoint"), head("Health"), head("Last 15 minutes"), head("Last check", true), head("Connect", true), head("Chance", true), head("Active", true), head("Total", true), head("Failures", true))),
    h("tbody", null, answer.service.endpoints.map((e) => row(e, history.get(e.address) ?? [], took.get(e.address), chance.get(e.address), now))))),
    h("p", { class: "dim small", text: note(answer.service) }));
}

// note says of what the times are.
function note(service) {
  const last = "Connect is the median of the last 64 connects that kproxy made in userspace, and the longest.";
  return service.dataplane === "userspace" ? last : `${last} What the kernel connects isn’t timed: the last check’s duration says most.`;
}

function row(e, changes, took, chance, now) {
  const mark = icon(healthIcon(e));
  mark.classList.add("dot");
  const where = [e.local ? "this node" : e.node, e.weight !== 1 ? `weight ${e.weight}` : "", e.terminating ? "terminating" : e.ready ? "" : "not ready"].filter(Boolean).join(", ");
  return h("tr", { data: { health: e.health } },
    h("th", { scope: "row" }, h("span", { class: "mono", text: e.address }), h("br"), h("span", { class: "dim small", text: where })),
    h("td", { class: "whole" }, h("span", { class: "nowrap" }, mark, " ", h("b", { text: capital(health(e.health).label) }), e.usable ? "" : ", not used"),
      h("br"), h("span", { class: "dim small nowrap", text: format.isSet(e.since) ? `for ${format.duration((now - Date.parse(e.since)) / 1000)}` : "not checked" }),
      e.lastError && e.health !== "up" ? h("p", { class: "small error", text: e.ejected ? capital(e.lastError) : `Last error: ${e.lastError}` }) : null),
    h("td", { class: "whole" }, strip(changes, now)),
    format.isSet(e.lastCheck) ? h("td", { class: "end" }, format.seconds(e.lastCheckSeconds ?? 0), h("br"), h("span", { class: "dim small nowrap", text: format.ago(e.lastCheck, now) })) : h("td", { class: "end", text: "–" }),
    h("td", { class: "end" }, took ? [format.seconds(took.medianSeconds), h("br"), h("span", { class: "dim small nowrap", text: `at most ${format.seconds(took.maxSeconds)}` })] : "–"),
    h("td", { class: "end", text: e.usable ? format.percent(chance) : "0%" }),
    h("td", { class: "end", text: format.count(e.activeConnections) }),
    h("td", { class: "end", text: format.count(e.totalConnections) }),
    h("td", { class: "end", text: format.count(e.failures) }));
}

function strip(changes, now) {
  const recent = segments(changes, now);
  const { times, total, errors } = outages(changes, now);
  const often = times === 1 ? "once" : times === 2 ? "twice" : `${times} times`;
  const label = recent.length === 0 ? "no health history" : times === 0 ? "never down" : [`down ${often}, ${format.duration(total / 1000)}`, errors.join(", ")].filter(Boolean).join(": ");
  const width = 160, height = 22;
  const shapes = { up: [3, 16], down: [17, 5], unknown: [10, 2] };
  const svg = s("svg", { class: "strip", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Health of the last 15 minutes: ${label}` },
    s("path", { class: "base", d: `M0 ${height - 0.5}H${width}` }),
    // Outages last, and never too narrow to be seen: a second is a tenth of a pixel.
    [...recent].sort((a, b) => Number(a.health === "down") - Number(b.health === "down")).map((x) => {
      const [y, tall] = shapes[x.health] ?? shapes.unknown;
      const wide = Math.max(x.health === "down" ? 3 : 1.5, (x.to - x.from) * width);
      return s("rect", { "data-health": x.health, x: Math.min(x.from * width, width - wide), y, width: wide, height: tall });
    }));
  return h("div", { class: "strip-cell" }, svg, h("span", { class: "dim small", "aria-hidden": "true", text: label }));
}
