// Makes rows as the stream sends them, for tests.
export function row(key, more = {}) {
  const [namespace, rest] = key.split("/");
  const [name, port = ""] = rest.split(":");
  return {
    key, namespace, name, port, protocol: "TCP", addresses: ["10.96.0.10:80"], nodePort: 0, algorithm: "round-robin",
    dataplane: "iptables", state: "offloaded", reason: "qualified", condition: "fine", problems: [], degraded: "",
    connections: { active: 0, total: 0, failed: 0, retried: 0, bytesIn: 0, bytesOut: 0 },
    rates: { connections: 0, bytesIn: 0, bytesOut: 0, failed: 0, retried: 0 },
    endpoints: { total: 2, up: 2, down: 0, unknown: 0, usable: 2 },
    dots: [{ address: "10.2.0.2:8080", health: "up", usable: true }, { address: "10.2.0.3:8080", health: "up", usable: true }],
    ...more,
  };
}
