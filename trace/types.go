package trace

import (
	"net/netip"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Request is what to trace.
type Request struct {
	Address  netip.AddrPort   `json:"address"`
	Protocol service.Protocol `json:"protocol"` // TCP or UDP
	// From is the client's address; the zero Addr is this node itself.
	From netip.Addr `json:"from,omitzero"`
	// Probe sends one real connection or datagram, from where the client is.
	Probe bool `json:"-"`
	// AnyClient has From be another host or a pod, whichever is known.
	AnyClient bool `json:"-"`
	// Netns is the path of the client's network namespace, and Pod the name of the pod on
	// this node that it is; empty if From says it all. They imply From.
	Netns string `json:"netns,omitempty"`
	Pod   string `json:"pod,omitempty"`
}

// Verdict is what becomes of the packet.
type Verdict string

// The verdicts. Undetermined is the answer where something in the way could not
// be read or is not understood; Findings say what.
const (
	Forwarded    Verdict = "forwarded"
	Refused      Verdict = "refused"
	Dropped      Verdict = "dropped"
	NotAService  Verdict = "not a service"
	Undetermined Verdict = "undetermined"
)

// Result is the answer to a Request.
type Result struct {
	Request
	// Namespace is the network namespace that was traced.
	Namespace string `json:"namespace"`
	// Service is "namespace/name" or "namespace/name:port"; empty if the address
	// is none of a service's, or no plan was there to ask.
	Service string `json:"service"`
	// Kind is "cluster IP", "node port", "external IP", "load balancer" or empty.
	Kind string `json:"kind"`
	// Client says who From is to kproxy: "a pod of this node", "this node
	// itself", "outside", ….
	Client    string         `json:"client"`
	DataPlane plan.DataPlane `json:"dataplane"` // empty without a plan
	State     string         `json:"state"`
	Reason    string         `json:"reason"` // why it is carried there

	Verdict Verdict `json:"verdict"`
	// Culprit is one sentence: what stops the packet, where, and the remedy; empty
	// if nothing does.
	Culprit    string      `json:"culprit"`
	Candidates []Candidate `json:"candidates"`
	Masquerade Masquerade  `json:"masquerade"`
	Steps      []Step      `json:"steps"` // in the order the packet meets them
	Findings   []Finding   `json:"findings"`
	Mismatches []Mismatch  `json:"mismatches"`
	Probe      *Probe      `json:"probe,omitempty"`
}

// Kinds of steps.
const (
	KindRule          = "rule"
	KindPolicy        = "policy"
	KindSet           = "set"
	KindRoute         = "route"
	KindVirtualServer = "virtual server"
	KindRealServer    = "real server"
	KindListener      = "listener"
	KindSetting       = "setting"
)

// Step is one thing that the packet meets.
type Step struct {
	// Hook is "PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING",
	// "routing", "userspace" or "IPVS".
	Hook  string `json:"hook"`
	Leg   string `json:"leg,omitempty"`   // the endpoint, from where the ways to endpoints part
	Table string `json:"table,omitempty"` // of netfilter
	Chain string `json:"chain,omitempty"`
	Kind  string `json:"kind"`
	// Text is the object as the kernel's own tool prints it.
	Text    string  `json:"text"`
	Packets *uint64 `json:"packets,omitempty"` // nil: it has no counter
	Bytes   *uint64 `json:"bytes,omitempty"`
	// Outcome is what it does with this packet: "matches: jump to KPROXY-PORTAL".
	Outcome string `json:"outcome"`
	Why     string `json:"why,omitempty"`
}

// Candidate is an endpoint of the service, whether it may get this packet or
// not.
type Candidate struct {
	Endpoint netip.AddrPort `json:"endpoint"`
	Node     string         `json:"node,omitempty"`
	// Probability that it is the one: 0..1, from what is in the kernel, or from
	// the picker in userspace.
	Probability float64 `json:"probability"`
	Usable      bool    `json:"usable"`
	Health      string  `json:"health,omitempty"`
	// Why says why it is a candidate or isn't, and what would stop the packet on
	// the way to it.
	Why     string  `json:"why,omitempty"`
	Packets *uint64 `json:"packets,omitempty"` // of its DNAT rule or real server
	Bytes   *uint64 `json:"bytes,omitempty"`
}

// Masquerade is whether another address replaces the client's.
type Masquerade struct {
	Yes    bool       `json:"yes"`
	Source netip.Addr `json:"source,omitzero"` // that the endpoint sees; zero if unknown
	Reason string     `json:"reason"`
}

// Severities of findings. An error stops the packet, or would one to some
// endpoint; a warning makes trouble possible; a note explains.
const (
	SeverityError   = "error"
	SeverityWarning = "warning"
	SeverityNote    = "note"
)

// Finding is something that a person should know about the way.
type Finding struct {
	Severity string `json:"severity"`
	What     string `json:"what"`
	Where    string `json:"where"`
	Remedy   string `json:"remedy,omitempty"`
}

// Mismatch is a difference between the plan and the kernel.
type Mismatch = kernel.Mismatch

// Probe is what became of a real connection or datagram.
type Probe struct {
	// From says where it was sent from.
	From string `json:"from"`
	// Outcome is "connected", "answered", "refused", "timeout", "unreachable" or,
	// for a datagram that nobody answered, "no answer".
	Outcome  string         `json:"outcome"`
	Endpoint netip.AddrPort `json:"endpoint,omitzero"` // that answered, as far as conntrack tells
	Seconds  float64        `json:"seconds"`
	// Conntrack are its own entries, as conntrack -L prints them.
	Conntrack []string `json:"conntrack"`
	Note      string   `json:"note,omitempty"`
}
