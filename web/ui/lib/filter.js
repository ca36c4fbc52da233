// Which service ports the overview shows, and in what order. Pure.

// orders are the ways to sort, by the name they have in the address.
export const orders = {
  name: { label: "Name", compare: byKey },
  active: { label: "Active connections", compare: most((r) => r.connections.active) },
  rate: { label: "New connections", compare: most((r) => r.rates.connections) },
  bytes: { label: "Throughput", compare: most((r) => r.rates.bytesIn + r.rates.bytesOut) },
  errors: { label: "Errors", compare: most((r) => r.connections.failed + r.connections.retried) },
};

// healths are the choices of the health filter.
export const healths = {
  down: { label: "Some endpoint down", has: (r) => r.endpoints.down > 0 },
  unusable: { label: "No usable endpoint", has: (r) => r.endpoints.usable === 0 },
  unknown: { label: "Some health unknown", has: (r) => r.endpoints.unknown > 0 },
  up: { label: "All endpoints up", has: (r) => r.endpoints.total > 0 && r.endpoints.up === r.endpoints.total },
};

// fromQuery reads a filter from an address; what isn't a choice is left out.
export function fromQuery(query) {
  const sort = query.get("sort") ?? "";
  const health = query.get("health") ?? "";
  return {
    q: query.get("q") ?? "",
    plane: query.get("plane") ?? "",
    state: query.get("state") ?? "",
    health: Object.hasOwn(healths, health) ? health : "",
    attention: query.get("attention") === "true",
    sort: Object.hasOwn(orders, sort) && sort !== "name" ? sort : "",
  };
}

// isEmpty reports whether a filter lets everything pass.
export function isEmpty(f) {
  return f.q.trim() === "" && !f.plane && !f.state && !f.health && !f.attention;
}

// select returns the rows that pass, in order. rows must be in order of key.
export function select(rows, f) {
  const words = f.q.toLowerCase().split(/\s+/).filter((w) => w !== "");
  const out = isEmpty(f) ? [...rows] : rows.filter((r) => passes(r, f, words));
  const order = orders[f.sort];
  return order ? out.sort(order.compare) : out;
}

function passes(r, f, words) {
  if (f.plane && r.dataplane !== f.plane) return false;
  if (f.state && r.state !== f.state) return false;
  if (f.attention && !needsAttention(r)) return false;
  if (f.health && !healths[f.health].has(r)) return false;
  if (words.length === 0) return true;
  const text = haystack(r);
  return words.every((w) => text.includes(w) || r.others?.some((address) => address.includes(w)));
}

// needsAttention reports whether a person should look at r: it refuses
// connections, has a problem or an endpoint that is down, or fails connections now.
export function needsAttention(r) {
  return r.state === "rejecting" || r.state === "recalled" || (r.problems?.length ?? 0) > 0 || Boolean(r.degraded) ||
    r.endpoints.down > 0 || r.rates.failed > 0;
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
