// Addresses of pages: all that one may want to send to a colleague is in the hash.
//
//   #/?q=web&class=failing&plane=ipvs&offset=50   service ports
//   #/service/shop/web:http/tcp                   a service port
//   #/nodes?state=lagging                         nodes
//   #/node/NAME                                   a node
//   #/flows                                       who talks to what

import { decode } from "../ui/lib/route.js";

const pages = ["services", "service", "nodes", "node", "flows"];

// parse returns {page, key, query}. What isn't an address is that of the service ports.
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [page, ...rest] = path.split("/");
  const key = rest.map(decode).join("/");
  return { page: pages.includes(page) ? page : "services", key, query: Object.fromEntries(new URLSearchParams(query)) };
}

export const service = (key) => `#/service/${key.split("/").map(encodeURIComponent).join("/")}`;
export const node = (name) => `#/node/${encodeURIComponent(name)}`;

// to returns the address of a page with the parameters that are set.
export function to(page, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "" && v !== 0 && v !== undefined)).toString();
  return `#/${page === "services" ? "" : page}${query ? `?${query}` : ""}`;
}
