// The form that chooses which connection the diagram follows: to which of the
// service's addresses, and from which client.

import { h, setText } from "../lib/dom.js";
import * as clients from "../lib/clients.js";

// mostClients is how many clients are offered by their addresses.
const mostClients = 12;

export class Tracer {
  #address = h("select", { id: "trace-address", name: "address" });
  #who = h("select", { id: "trace-who", name: "who" }, h("option", { value: "recent", text: "a recent client" }), h("option", { value: "node", text: "this node itself" }), h("option", { value: "other", text: "another address …" }));
  #from = h("input", { id: "trace-from", name: "from", type: "text", placeholder: "10.1.0.2", autocomplete: "off", spellcheck: "false", "aria-label": "Address of the client" });
  #go = h("button", { type: "submit", class: "tool", text: "Trace" });
  #error = h("p", { class: "small trace-error", role: "status" });
  #command = h("code");
  #copy = h("button", { type: "button", class: "tool", text: "Copy" });
  #recent = "";
  #chosen = false;
  #protocol = "tcp";

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
    this.command = h("p", { class: "trace-command small" }, h("span", { class: "dim", text: "On the node:" }), this.#command, this.#copy);
    this.#copy.hidden = !navigator.clipboard; // browsers have it at https and loopback addresses only
    this.#copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(this.#command.textContent);
        setText(this.#copy, "Copied");
      } catch {
        setText(this.#copy, "Not allowed");
      }
      setTimeout(() => setText(this.#copy, "Copy"), 2_000);
    });
  }

  // begin starts anew for a service port, with what its page's address asks for.
  begin(query) {
    this.#recent = "";
    while (this.#who.options.length > 3) this.#who.remove(1);
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
    const [recent] = clients.recentClients(connections, this.#address.value);
    if (recent && (!this.#recent || clients.family(recent) !== clients.family(this.#recent))) this.#recent = recent;
    else if (this.#recent && this.#address.value && clients.family(this.#recent) !== clients.family(clients.host(this.#address.value))) this.#recent = "";
    setText(this.#who.options[0], this.#recent ? `a recent client, ${this.#recent}` : "a recent client (none yet: another host or pod)");
    const family = clients.family(clients.host(this.#address.value));
    for (const o of [...this.#who.options]) {
      const client = o.value !== "recent" && o.value !== "node" && o.value !== "other";
      if (client && !o.selected && clients.family(o.value) !== family) o.remove(); // it can't connect there
    }
    const known = new Set([...this.#who.options].map((o) => o.value));
    for (const c of clients.recentClients(connections, this.#address.value)) {
      if (!known.has(c) && this.#who.options.length < 3 + mostClients) this.#who.add(h("option", { value: c, text: c }), this.#who.options.length - 2);
    }
    this.#show();
  }

  // choose follows a client from now on.
  choose(client) {
    if (![...this.#who.options].some((o) => o.value === client)) this.#who.add(h("option", { value: client, text: client }), 1);
    this.#who.value = client;
    // To an address that the client can connect to.
    const reach = [...this.#address.options].find((o) => clients.family(clients.host(o.value)) === clients.family(client));
    if (reach && clients.family(clients.host(this.#address.value)) !== clients.family(client)) this.#address.value = reach.value;
    this.#who.dispatchEvent(new Event("change"));
    this.el.scrollIntoView({ block: "center" });
    this.#who.focus({ preventScroll: true });
  }

  // from is the client, in the words of kproxy trace: empty for this node.
  #client() {
    return { recent: this.#recent, node: "", other: this.#from.value.trim() }[this.#who.value] ?? this.#who.value;
  }

  // show writes the command that prints what is drawn, if there is one. Readers paste it into a shell, and parts of it come
  // from the page's address, which may be another's link: so nothing but addresses gets in.
  #show() {
    const from = this.#client();
    setText(this.#command, `kproxy trace ${from ? `--from ${from} ` : ""}${this.#protocol === "udp" ? "--proto udp " : ""}${this.#address.value}`);
    const address = /^[0-9A-Za-z.:%[\]_-]+$/;
    const unknown = this.#who.value === "recent" && !from; // the command would have the node itself ask
    this.command.hidden = unknown || !address.test(this.#address.value) || (from !== "" && !address.test(from)) || this.#protocol === "sctp";
  }

  // request returns the parameters of /api/v1/trace; null if there is no address.
  request(protocol) {
    this.#protocol = protocol.toLowerCase();
    this.#show();
    if (!this.#address.value) return null;
    return { address: this.#address.value, protocol: this.#protocol, from: this.#client() || (this.#who.value === "recent" ? "client" : "") };
  }

  // query is what the page's address keeps of the choices.
  query() {
    if (!this.#chosen) return {};
    return { address: this.#address.value, from: { recent: "", node: "node" }[this.#who.value] ?? this.#client() };
  }

  fail(message) {
    setText(this.#error, message);
  }

  #toggle() {
    this.#from.hidden = this.#go.hidden = this.#who.value !== "other";
  }
}
