// Rows as comma-separated values (RFC 4180). Pure.

const fields = {
  namespace: (r) => r.namespace, service: (r) => r.name, port: (r) => r.port, protocol: (r) => r.protocol,
  addresses: (r) => r.addresses.join(" "), dataplane: (r) => r.dataplane, state: (r) => r.state, condition: (r) => r.condition,
  reason: (r) => r.reason, endpoints: (r) => r.endpoints.total, up: (r) => r.endpoints.up, down: (r) => r.endpoints.down,
  usable: (r) => r.endpoints.usable, active: (r) => r.connections.active, total: (r) => r.connections.total,
  failed: (r) => r.connections.failed, retried: (r) => r.connections.retried, new_per_second: (r) => r.rates.connections,
};

export function csv(rows) {
  const lines = [Object.keys(fields), ...rows.map((r) => Object.values(fields).map((f) => f(r)))];
  return lines.map((l) => l.map(quote).join(",") + "\r\n").join("");
}

// quote also keeps a spreadsheet from taking text for a formula: an annotation may have
// put anything into a reason.
function quote(value) {
  let text = String(value ?? "");
  if (typeof value === "string" && /^[=+@\t-]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
