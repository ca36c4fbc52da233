// The form that chooses which connection the diagram follows: to which of the
// service's addresses, and from which client.

import { h, setText } from "../lib/dom.js";
import * as clients from "../lib/clients.js";

export class Tracer {
  #address = h("select", { id: "trace-address", name: "address" });
  #who = h("select", { id: "trace-who", name: "who" }, h("option", { value: "recent", text: "a recent client" }), h("option", { value: "node", text: "this node itself" }), h("option", { value: "other", text: "another address …" }));
  #from = h("input", { id: "trace-from", name: "from", type: "text", placeholder: "10.1.0.2", autocomplete: "off", spellcheck: "false", "aria-label": "Address of the client" });
  #go = h("button", { type: "submit", class: "tool", text: "Trace" });
  #error = h("p", { class: "small trace-error", role: "status" });
  #recent = "";
  #chosen = false;

  // onChange is called when another connection is to be followed.
  constructor(onChange) {
    const changed = () => {
      this.#chosen = true;
      this.#toggle();
      if (this.#who.value !== "other" || this.#from.value.trim() !== "") onChange();
      else this.#from.focus();
    };
    this.#address.addEventListener("change", changed);
    this.#who.addEventListener("change", changed);
    const field = (label, id, el) => h("div", { class: "field" }, h("label", { for: id, text: label }), el);
    this.el = h("form", {
      class: "tracer", on: {
        submit: (e) => {
          e.preventDefault();
          changed();
        },
      },
    }, field("Follow a connection to", "trace-address", this.#address), field("from", "trace-who", this.#who), this.#from, this.#go, this.#error);
  }

  // begin starts anew for a service port, with what its page's address asks for.
  begin(query) {
    this.#recent = "";
    this.#chosen = query.has("from") || query.has("address");
    const from = query.get("from") ?? "";
    this.#who.value = from === "node" ? "node" : from ? "other" : "recent";
    this.#from.value = from && from !== "node" ? from : "";
    this.#address.replaceChildren();
    if (query.get("address")) this.#address.append(h("option", { value: query.get("address"), text: query.get("address") }));
    this.fail("");
    this.#toggle();
  }

  // offer brings the choices up to date.
  offer(row, connections) {
    const have = new Set([...this.#address.options].map((o) => o.value));
    for (const a of clients.addresses(row, connections)) if (!have.has(a)) this.#address.append(h("option", { value: a, text: a }));
    const recent = clients.recentClient(connections, this.#address.value);
    if (recent && (!this.#recent || clients.family(recent) !== clients.family(this.#recent))) this.#recent = recent;
    else if (this.#recent && this.#address.value && clients.family(this.#recent) !== clients.family(clients.host(this.#address.value))) this.#recent = "";
    setText(this.#who.options[0], this.#recent ? `a recent client, ${this.#recent}` : "a recent client (none yet: another host or pod)");
  }

  // request returns the parameters of /api/v1/trace; null if there is no address.
  request(protocol) {
    if (!this.#address.value) return null;
    return { address: this.#address.value, protocol: protocol.toLowerCase(), from: { recent: this.#recent || "client", node: "", other: this.#from.value.trim() }[this.#who.value] };
  }

  // query is what the page's address keeps of the choices.
  query() {
    if (!this.#chosen) return {};
    return { address: this.#address.value, from: { recent: "", node: "node", other: this.#from.value.trim() }[this.#who.value] };
  }

  fail(message) {
    setText(this.#error, message);
  }

  #toggle() {
    this.#from.hidden = this.#go.hidden = this.#who.value !== "other";
  }
}
