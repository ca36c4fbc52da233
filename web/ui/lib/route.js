// Addresses of pages. Everything that a person may want to send to a colleague is
// in the hash: the page, the service, the search and its filters.
//
//   #/?q=web&plane=ipvs&hide=why,rate   the overview
//   #/service/shop/web:http?from=10.1.0.2   a service port
//   #/node                the node

// parse returns {page: "overview"|"service"|"node", key, query}. What isn't an
// address is the overview's.
export function parse(hash) {
  const text = hash.replace(/^#\/?/, "");
  const mark = text.indexOf("?");
  const path = mark < 0 ? text : text.slice(0, mark);
  const query = new URLSearchParams(mark < 0 ? "" : text.slice(mark + 1));
  const parts = path.split("/").filter((p) => p !== "").map(decode);
  if (parts[0] === "service" && parts.length === 3) return { page: "service", key: `${parts[1]}/${parts[2]}`, query };
  if (parts[0] === "node" && parts.length === 1) return { page: "node", key: "", query };
  return { page: "overview", key: "", query };
}

// service returns the address of a service port's page.
export function service(key) {
  const [namespace, rest] = split(key);
  return `#/service/${encode(namespace)}/${encode(rest)}`;
}

// withQuery appends the parameters that are set, in order of name.
export function withQuery(path, params) {
  const query = new URLSearchParams();
  for (const name of Object.keys(params).sort()) {
    if (params[name] !== "" && params[name] !== undefined && params[name] !== false) query.set(name, String(params[name]));
  }
  const text = query.toString();
  return text === "" ? path : `${path}?${text}`;
}

// grafana returns the address of deploy/monitoring's dashboard in the Grafana at an address, for a node
// and, unless key is empty, the Service of that service port.
export function grafana(base, node, key) {
  const [namespace, rest] = split(key);
  const service = key === "" ? {} : { "var-namespace": namespace, "var-service": rest.split(":")[0] };
  return withQuery(`${base.replace(/\/+$/, "")}/d/kproxy`, { "var-instance": node, ...service });
}

// split cuts "namespace/name:port" after the namespace.
export function split(key) {
  const slash = key.indexOf("/");
  return [key.slice(0, slash), key.slice(slash + 1)];
}

// A colon may stand in a path as it is, and reads better.
function encode(s) {
  return encodeURIComponent(s).replaceAll("%3A", ":");
}

export function decode(s) {
  try {
    return decodeURIComponent(s);
  } catch {
    return s;
  }
}
