// Clients and addresses taken from live connections, as suggestions for a trace.
// Pure.

// host returns the address of "10.0.0.1:80" or "[fd00::1]:80" without its port.
export function host(addressAndPort) {
  const text = addressAndPort ?? "";
  if (text.startsWith("[")) return text.slice(1, text.indexOf("]"));
  return text.slice(0, text.lastIndexOf(":"));
}

// family returns 4 or 6.
export function family(address) {
  return address.includes(":") ? 6 : 4;
}

// recentClients returns the clients that could connect to an address (IP:PORT), those
// with the most connections first.
export function recentClients(connections, address) {
  const want = family(host(address));
  const seen = new Map();
  for (const c of connections) {
    const from = host(c.client);
    if (from && family(from) === want) seen.set(from, (seen.get(from) ?? 0) + 1);
  }
  return [...seen].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([c]) => c);
}

// addresses returns where a service port can be reached: its own addresses, then
// node ports that connections came to.
export function addresses(row, connections) {
  const out = [...row.addresses];
  for (const c of connections) {
    if (row.nodePort && c.address?.endsWith(`:${row.nodePort}`) && !out.includes(c.address)) out.push(c.address);
  }
  return out;
}
