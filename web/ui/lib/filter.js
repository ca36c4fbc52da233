// Which service ports the overview shows, and in what order. Pure.

// orders are the ways to sort, by the name they have in the address.
export const orders = {
  worst: { label: "Worst first", compare: (a, b) => severity(a) - severity(b) },
  name: { label: "Name", compare: byKey },
  active: { label: "Active connections", compare: most((r) => r.connections.active) },
  rate: { label: "New connections", compare: most((r) => r.rates.connections) },
  bytes: { label: "Throughput", compare: most((r) => r.rates.bytesIn + r.rates.bytesOut) },
  errors: { label: "Errors", compare: most((r) => r.connections.failed + r.connections.retried) },
};

// conditions are how a service port can fare, worst first, as kproxy says it.
export const conditions = ["unanswered", "failing", "down", "troubled", "vacant", "fine"];

const severities = new Map(conditions.map((c, i) => [c, i]));

function severity(r) {
  return severities.get(r.condition) ?? 0;
}

// fromQuery reads a filter from an address; what isn't a choice is left out.
export function fromQuery(query) {
  const sort = query.get("sort") ?? "";
  const condition = query.get("condition") ?? "";
  return {
    q: query.get("q") ?? "",
    plane: query.get("plane") ?? "",
    state: query.get("state") ?? "",
    condition: conditions.includes(condition) ? condition : "",
    sort: Object.hasOwn(orders, sort) && sort !== "worst" ? sort : "",
    hide: query.get("hide") ?? "",
  };
}

// isEmpty reports whether a filter lets everything pass.
export function isEmpty(f) {
  return f.q.trim() === "" && !f.plane && !f.state && !f.condition;
}

// select returns the rows that pass, in order. rows must be in order of key.
export function select(rows, f) {
  const words = f.q.toLowerCase().split(/\s+/).filter((w) => w !== "");
  const out = isEmpty(f) ? [...rows] : rows.filter((r) => passes(r, f, words));
  return f.sort === "name" ? out : out.sort(orders[f.sort || "worst"].compare);
}

function passes(r, f, words) {
  if (f.plane && r.dataplane !== f.plane) return false;
  if (f.state && r.state !== f.state) return false;
  if (f.condition && r.condition !== f.condition) return false;
  if (words.length === 0) return true;
  const text = haystack(r);
  return words.every((w) => text.includes(w) || r.others?.some((address) => address.includes(w)));
}

function haystack(r) {
  const parts = [r.key, r.protocol, r.algorithm, r.state, r.dataplane, r.reason, ...r.addresses, ...r.dots.map((d) => d.address)];
  if (r.nodePort) parts.push(`:${r.nodePort}`);
  return parts.join(" ").toLowerCase();
}

// most sorts by figure, the largest first; equals stay in order of key.
function most(figure) {
  return (a, b) => figure(b) - figure(a) || byKey(a, b);
}

// byKey orders as kproxy does: by namespace, then name, then port, bytewise.
export function byKey(a, b) {
  return text(a.namespace, b.namespace) || text(a.name, b.name) || text(a.port, b.port);
}

function text(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}
