// What the data planes, states and health values are called, which icon goes with
// each (colour never stands alone), and what they mean and cost, for people who
// see them for the first time.

// planes are the generations of the service proxy, in order of age. Levels of
// cost are 1 (little) to 3 (much). Those in the kernel also say what the diagram's box
// and the story tell of a path p, and what is remarkable about their cluster IPs.
export const planes = {
  userspace: {
    label: "Userspace", icon: "i-userspace", generation: "first generation",
    brief: "kproxy itself carries every byte",
    how: "The kernel hands new connections to kproxy. kproxy accepts each one, picks an endpoint, opens a second connection to it and relays the bytes of both. Because it holds the connection, it can choose exactly (least connections, too), sees every failure, and tries another endpoint when one doesn’t answer: the client notices nothing.",
    pays: "Every byte crosses from the kernel to a process and back, so each connection and each gigabyte costs processor time. In return, a change of endpoints takes effect at once, and a failed connect is repaired.",
    costs: [
      { what: "Opening a connection", level: 3, words: "two connections and a process that wakes up" },
      { what: "Every byte", level: 3, words: "passes through kproxy" },
      { what: "A change of endpoints", level: 1, words: "a pointer in memory" },
      { what: "An endpoint that refuses", level: 1, words: "kproxy tries another one" },
    ],
  },
  iptables: {
    label: "iptables", icon: "i-iptables", generation: "second generation",
    brief: "the kernel rewrites where packets go",
    how: "Rules in the kernel look at the first packet of a connection. A chain that belongs to this service picks an endpoint, in turn or at random, and rewrites the packet’s destination (DNAT). The kernel’s connection table (conntrack) remembers the choice, so every later packet is rewritten without looking at a rule. kproxy isn’t on the way at all.",
    pays: "Bytes are nearly free. The first packet walks a few rules (kproxy arranges them as a tree, so a few even among thousands of services). Changing rules is slow when there are many, so kproxy serves a changing service in userspace meanwhile. An endpoint that refuses a connection costs the client about a second: its own second try goes to another endpoint, as kproxy ejects this one until it answers.",
    costs: [
      { what: "Opening a connection", level: 2, words: "a walk through some rules" },
      { what: "Every byte", level: 1, words: "a lookup in conntrack" },
      { what: "A change of endpoints", level: 3, words: "rules are written; seconds when there are many" },
      { what: "An endpoint that refuses", level: 2, words: "the client waits about a second; the endpoint is ejected" },
    ],
    box: { wide: "DNAT chain", narrow: "DNAT chain", first: (p) => p.chain || "rewrites the destination" },
    carries: (p) => `A chain of rules that belongs to the service${p.chain ? ` (${p.chain})` : ""} picks an endpoint and rewrites the packet’s destination (DNAT). conntrack remembers it for all later packets.`,
  },
  ipvs: {
    label: "IPVS", icon: "i-ipvs", generation: "third generation",
    brief: "the kernel’s own load balancer",
    how: "IPVS is a load balancer inside the kernel. The service’s address and port are a virtual server, its endpoints are real servers. A hash table finds the virtual server at the same speed among ten services or ten thousand, and a scheduler (round robin, least connections, source hash, Maglev …) chooses the real server. kproxy isn’t on the way.",
    pays: "Bytes are nearly free, the first packet costs the same however many services there are, and adding or removing an endpoint is one small message to the kernel. It needs the ip_vs kernel module, and the addresses on a link of their own. An endpoint that refuses a connection costs the client about a second: its own second try goes to another endpoint, as kproxy ejects this one until it answers.",
    costs: [
      { what: "Opening a connection", level: 1, words: "one hash lookup and a scheduler" },
      { what: "Every byte", level: 1, words: "a lookup in IPVS and conntrack" },
      { what: "A change of endpoints", level: 1, words: "one message to the kernel" },
      { what: "An endpoint that refuses", level: 2, words: "the client waits about a second; the endpoint is ejected" },
    ],
    box: { wide: "Virtual server", narrow: "IPVS", first: (p) => `scheduler ${p.scheduler || "of IPVS"}` },
    carries: (p) => `IPVS finds the virtual server in a hash table, and its scheduler${p.scheduler ? ` (${p.scheduler})` : ""} chooses a real server. Later packets follow the first.`,
    clusterIP: ". It stands for the service: IPVS needs it on a link, so each node that IPVS serves it on has it, and no other machine.",
  },
  nftables: {
    label: "nftables", icon: "i-nftables", generation: "fourth generation",
    brief: "services are elements of the kernel’s maps",
    how: "As with iptables, the kernel rewrites the destination of a connection’s first packet (DNAT), and conntrack remembers it. But services aren’t chains: their addresses and endpoints are elements of maps, and a few rules that all services share look them up. kproxy isn’t on the way.",
    pays: "Bytes are nearly free, the first packet costs the same however many services there are, and a change of endpoints is a few elements in one message to the kernel. Endpoints are chosen at random, or in turn where a service asks for it. An endpoint that refuses a connection costs the client about a second: its own second try goes to another endpoint, as kproxy ejects this one until it answers.",
    costs: [
      { what: "Opening a connection", level: 1, words: "look-ups in maps" },
      { what: "Every byte", level: 1, words: "a lookup in conntrack" },
      { what: "A change of endpoints", level: 1, words: "one message to the kernel" },
      { what: "An endpoint that refuses", level: 2, words: "the client waits about a second; the endpoint is ejected" },
    ],
    box: { wide: "Element of a map", narrow: "nftables", first: (p) => (p.chain ? `chain ${p.chain}` : "rewrites the destination") },
    carries: (p) => `The map of services leads its address to a chain${p.chain ? ` (${p.chain})` : ""} that many share; a number drawn there stands for an endpoint in the map of backends, and the packet’s destination is rewritten (DNAT). conntrack remembers it for all later packets.`,
  },
  none: {
    label: "Not served", icon: "i-none", generation: "",
    brief: "new connections are refused, dropped, or another proxy’s",
    how: "No data plane takes new connections of this service: it has no endpoint that could answer, or another proxy serves it.",
    pays: "Clients are refused at once (a reset or an ICMP message) rather than left waiting, except where a traffic policy demands that packets are dropped.",
    costs: [],
  },
};

// planeOrder is the order in which planes are shown.
export const planeOrder = Object.keys(planes);

// kernelPlanes are those in the kernel.
export const kernelPlanes = planeOrder.filter((name) => planes[name].carries);

// states are where a service is on its way between data planes.
export const states = {
  userspace: { label: "Stays in userspace", icon: "i-home", means: "It is served in userspace and isn’t about to leave it." },
  qualifying: { label: "Qualifying", icon: "i-clock", means: "It is served in userspace and moves to the kernel when its reason is gone." },
  offloaded: { label: "Offloaded", icon: "i-down", means: "The kernel carries its connections." },
  recalled: { label: "Recalled", icon: "i-up", means: "It was taken back from the kernel, and waits before it may return." },
  pinned: { label: "Pinned", icon: "i-pin", means: "A person keeps it where it is (kproxy pin, or an annotation)." },
  rejecting: { label: "Rejecting", icon: "i-stop", means: "No endpoint can take connections; new ones are refused." },
  excluded: { label: "Left alone", icon: "i-none", means: "Another proxy serves it; kproxy doesn’t touch it." },
};

// healths are what active checks found out.
export const healths = {
  up: { label: "up", icon: "h-up" },
  down: { label: "down", icon: "h-down" },
  unknown: { label: "unknown", icon: "h-unknown" },
};

export function plane(name) {
  return planes[name] ?? { label: name || "unknown", icon: "i-none", brief: "", how: "", pays: "", costs: [], generation: "" };
}

export function state(name) {
  return states[name] ?? { label: name || "unknown", icon: "i-none", means: "" };
}

export function health(name) {
  return healths[name] ?? healths.unknown;
}

// sentence gives one of kproxy's reasons the form of a sentence.
export function sentence(text) {
  if (!text) return "";
  const first = capital(text);
  return /[.!?…]$/.test(first) ? first : first + ".";
}

// why is the reason for a row's data plane, as a sentence.
export function why(row) {
  if (row.reason === "qualified") return "Qualified: steady endpoints, and connections that worked.";
  return sentence(row.reason);
}

// capital only makes the first letter large, unless the first word is the name of a
// program, or no word.
export function capital(text) {
  if (!text || !/^[a-z]+(?=[ .,:;]|$)/.test(text) || names.test(text)) return text ?? "";
  return text[0].toUpperCase() + text.slice(1);
}

const names = /^(kproxy|iptables|ipvs|ipset|ip|ipvsadm|conntrack|modprobe|sysctl|nft)\b/;
