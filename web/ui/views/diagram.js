// The path diagram: boxes and lines as SVG, from a path (lib/path.js) and its
// layout (lib/layout.js). It is drawn anew only when the path's shape or the width
// changes; otherwise only counters change, so that nothing flickers. The taken
// branch is shown by a thick line, a mark with words, and only then by colour.

import { s, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { layout } from "../lib/layout.js";
import * as pathOf from "../lib/path.js";
import * as words from "../lib/words.js";
import { healthIcon } from "./parts.js";

const title = 14, small = 12; // font sizes

// ends are the headings of the box where a connection ends that no endpoint takes.
const ends = { dropped: "Dropped", refused: "Refused", "not a service": "Not a service", undetermined: "Unknown" };

let pen = null; // measures text

export class Diagram {
  el = s("svg", { class: "diagram", role: "img", "aria-labelledby": "diagram-name", focusable: "false" });
  #texts = new Map(); // id → function(path) and its element
  #drawn = "";
  #width = 0;
  #path = null;

  constructor(container) {
    container.append(this.el);
    new ResizeObserver(([entry]) => {
      const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
      this.#width = Math.round(entry.contentRect.width / (rem / 16));
      if (this.#path) this.show(this.#path);
    }).observe(container);
  }

  show(path) {
    this.#path = path;
    if (this.#width < 100) return;
    const shape = `${this.#width}|${pathOf.shape(path)}|${path.address}|${path.hook}|${path.client.from}`;
    if (shape !== this.#drawn) {
      this.#drawn = shape;
      this.#draw(path);
    }
    for (const [el, text] of this.#texts) setText(el, text(path));
    this.#flow(path);
  }

  #draw(p) {
    this.#texts.clear();
    const drawn = p.endpoints.length + (p.hidden > 0 ? 1 : 0);
    const l = layout(this.#width, drawn);
    this.el.setAttribute("viewBox", `0 0 ${l.width} ${l.height}`);
    this.el.dataset.plane = p.taken === "kernel" ? p.beneath : p.taken;
    const name = s("title", { id: "diagram-name", text: summary(p) });
    this.el.replaceChildren(name, this.#bands(l), this.#edges(p, l, drawn), this.#boxes(p, l), ...this.#endpoints(p, l));
  }

  #bands(l) {
    const names = { user: "userspace: kproxy’s process", kernel: "this node’s kernel" };
    return s("g", null, l.bands.map((b) => s("g", { class: `band ${b.id}` },
      s("rect", { x: b.x, y: b.y, width: b.w, height: b.h, rx: 10 }),
      l.vertical ? null : s("text", { x: b.x + 12, y: b.id === "user" ? b.y + 19 : b.y + b.h - 10, class: "band-name", text: names[b.id] }))));
  }

  #boxes(p, l) {
    const plane = words.plane(p.beneath), box = plane.box ?? words.planes.iptables.box;
    const userspace = p.taken === "userspace", kernel = p.taken === "kernel";
    const out = [
      this.#box(l.boxes.client, { heading: "Client", lines: [() => p.client.from || words.capital(p.client.who), () => (p.client.from ? p.client.who : "")], taken: true }),
      this.#box(l.boxes.hook, { heading: p.hook, lines: [() => (p.hook === "OUTPUT" ? "packets of this node" : "packets that arrive"), (x) => counter(x.packets.hook)], taken: true }),
      this.#box(l.boxes.check, { heading: "Redirect rules ask", lines: [(x) => `${mark(x.alive)} kproxy alive? ${yes(x.alive)}`, (x) => `${mark(x.inSet)} in userspace set? ${yes(x.inSet)}`], taken: true }),
      this.#box(l.boxes.userspace, { heading: l.vertical ? "kproxy" : "kproxy’s listener", plane: "userspace", icon: "i-userspace", taken: userspace, lines: [() => `picks: ${p.algorithm}`, ...(userspace ? [() => "relays every byte", everybody] : [() => "not taken"])] }),
      this.#box(l.boxes.kernel, { heading: p.taken === "none" ? ends[p.verdict] ?? "Refused" : p.userspaceOnly ? "No rules" : (l.vertical ? box.narrow : box.wide), plane: p.taken === "none" ? "none" : p.beneath, icon: p.taken === "none" ? "i-stop" : plane.icon, taken: kernel || p.taken === "none", lines: this.#kernelLines(p, kernel) }),
    ];
    return s("g", null, out);
  }

  #kernelLines(p, taken) {
    if (p.taken === "none") return [() => ({ dropped: "the client gets no answer", undetermined: "what becomes of it isn’t known" }[p.verdict] ?? "the client is refused at once"), () => "see below why"];
    if (p.userspaceOnly) return [() => "this service has none", () => "not taken"];
    const { first } = words.plane(p.beneath).box ?? words.planes.iptables.box;
    if (!taken) return [first, () => "ready as fallback, not taken"];
    return [first, (x) => counter(x.packets.kernel) || "rewrites packets", everybody];
  }

  #box(b, { heading, lines, taken, plane, icon }) {
    const g = s("g", { class: `box ${taken ? "taken" : "idle"}`, "data-plane": plane ?? null }, s("rect", { x: b.x, y: b.y, width: b.w, height: b.h, rx: 8 }));
    const left = b.x + 12;
    let y = b.y + (b.h - (20 + lines.length * 18)) / 2 + 16;
    if (icon) g.append(s("use", { href: `#${icon}`, x: left, y: y - 13, width: 15, height: 15 }));
    g.append(s("text", { class: "heading", x: left + (icon ? 21 : 0), y, text: fit(heading, b.w - 22 - (icon ? 21 : 0), title, 650) }));
    for (const line of lines) {
      y += 19;
      const el = s("text", { class: "detail", x: left, y });
      const full = line(this.#path);
      if (fit(full, b.w - 20, small) !== full) g.append(s("title", { text: full }));
      this.#texts.set(el, (x) => fit(line(x), b.w - 20, small));
      g.append(el);
    }
    return g;
  }

  #endpoints(p, l) {
    const out = p.endpoints.map((e, i) => {
      const b = l.boxes[`endpoint-${i}`];
      const now = (x) => x.endpoints[i] ?? e;
      const g = s("g", { class: `box endpoint ${e.usable && p.taken !== "none" ? "taken" : "idle"}`, "data-health": e.health },
        s("rect", { x: b.x, y: b.y, width: b.w, height: b.h, rx: 8 }),
        s("use", { class: "mark", href: `#${healthIcon(e)}`, x: b.x + 11, y: b.y + 9, width: 12, height: 12 }),
        s("text", { class: "heading mono", x: b.x + 29, y: b.y + 20, text: fit(e.address, b.w - 78, 14) }),
        s("title", { text: [e.address, words.health(e.health).label, e.why].filter(Boolean).join(": ") }));
      const chance = s("text", { class: "chance", x: b.x + b.w - 10, y: b.y + 20, "text-anchor": "end" });
      this.#texts.set(chance, (x) => (now(x).usable && now(x).probability !== undefined ? format.percent(now(x).probability) : ""));
      g.append(chance);
      const line = s("text", { class: "detail", x: b.x + 29, y: b.y + 37 });
      this.#texts.set(line, (x) => fit(detail(now(x)), b.w - 36, small));
      g.append(line);
      return g;
    });
    if (p.hidden > 0) {
      const b = l.boxes[`endpoint-${p.endpoints.length}`];
      out.push(s("g", { class: "box endpoint idle" }, s("rect", { x: b.x, y: b.y, width: b.w, height: b.h, rx: 8 }), s("text", { class: "detail", x: b.x + 29, y: b.y + 28, text: `and ${p.hidden} more, listed below` })));
    }
    return out;
  }

  #edges(p, l, drawn) {
    const way = p.taken === "userspace" ? "userspace" : "kernel";
    const idle = [], taken = [], labels = [];
    const edge = (id, is) => {
      const e = l.edges[id];
      const group = s("g", { class: `edge ${is ? "taken" : "idle"}` }, s("path", { class: "line", d: e.d }), is ? s("path", { class: "flow", d: e.d }) : null, s("path", { class: "head", d: arrow(e.end) }));
      (is ? taken : idle).push(group);
    };
    edge("client-hook", true);
    edge("hook-check", true);
    edge("check-userspace", p.taken === "userspace");
    edge("check-kernel", p.taken !== "userspace");
    for (let i = 0; i < drawn; i++) {
      const usable = p.taken !== "none" && (p.endpoints[i]?.usable ?? false);
      if (usable) edge(`${way}-${i}`, true);
    }
    const label = (id, text, dy = -8) => {
      const at = l.edges[id].label;
      const el = s("text", { class: "edge-label", x: at.x, y: at.y + (l.vertical ? 4 : dy), "text-anchor": at.anchor });
      this.#texts.set(el, text);
      labels.push(el);
    };
    label("check-userspace", () => (l.vertical ? "yes, twice" : p.taken === "userspace" ? "yes: DNAT" : "if both: yes"), l.vertical ? 4 : -4);
    label("check-kernel", () => (l.vertical ? "no" : p.taken === "userspace" ? "otherwise" : p.taken === "none" ? "no" : "no: goes on"), 16);
    return s("g", null, idle, taken, labels);
  }

  // flow moves dashes along the taken lines, faster with more connections.
  #flow(p) {
    const speed = p.newPerSecond > 0 ? Math.max(0.4, 2.4 - Math.log10(1 + p.newPerSecond)) : 0;
    this.el.classList.toggle("still", speed === 0);
    this.el.style.setProperty("--flow", `${speed.toFixed(1)}s`);
  }
}

// summary is what a screen reader says of the picture; the sentences below it
// say all of it.
function summary(p) {
  const way = { userspace: "through kproxy in userspace", kernel: `through the kernel by ${words.plane(p.beneath).label}`, none: "nowhere: it is refused" }[p.taken];
  return `Diagram: a connection to ${p.address} goes from the client to the hook ${p.hook}, is checked against the userspace set, and goes ${way}. ${p.usable} of ${p.total} endpoints can take it. The steps are listed below.`;
}

function detail(e) {
  const parts = [];
  if (!e.usable) return e.health === "down" ? "down: gets no connections" : "gets no new connections";
  if (e.active !== undefined) parts.push(`${format.count(e.active)} active`);
  if (e.packets !== undefined && e.packets !== null) parts.push(`${format.count(e.packets)} packets`);
  if (e.own > 0) parts.push(`${format.count(e.own)} of this client`);
  return parts.join(" · ") || e.health;
}

function counter(packets) {
  return packets === undefined || packets === null ? "" : `${format.count(packets)} packets so far`;
}

// everybody is the service's rate. It stands at the service's own box, not at the
// client whose way is drawn: it is that of all clients.
function everybody(p) {
  return `${format.rate(p.newPerSecond)} new/s in all`;
}

function mark(is) {
  return is ? "✓" : "✗";
}

function yes(is) {
  return is ? "yes" : "no";
}

// fit cuts text to a width in pixels.
function fit(text, width, size, weight = 400) {
  pen ??= document.createElement("canvas").getContext("2d");
  pen.font = `${weight} ${size}px ${getComputedStyle(document.body).fontFamily}`;
  if (pen.measureText(text).width <= width) return text;
  let n = text.length;
  while (n > 1 && pen.measureText(text.slice(0, n) + "…").width > width) n--;
  return text.slice(0, n) + "…";
}

function arrow({ x, y, down }) {
  return down ? `M${x - 5} ${y - 3}L${x} ${y + 5}L${x + 5} ${y - 3}Z` : `M${x - 3} ${y - 5}L${x + 5} ${y}L${x - 3} ${y + 5}Z`;
}
