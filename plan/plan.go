package plan

import (
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// DataPlane names what carries a service's new connections.
type DataPlane string

// The data planes. None means that new connections are refused or dropped, or
// another proxy's.
const (
	Userspace DataPlane = "userspace"
	IPTables  DataPlane = "iptables"
	IPVS      DataPlane = "ipvs"
	NFTables  DataPlane = "nftables"
	None      DataPlane = "none"
)

// DataPlanes lists all of them, in the order in which they are shown.
var DataPlanes = []DataPlane{Userspace, NFTables, IPTables, IPVS, None}

// State says where a service is on its way between data planes.
type State string

// The states of `kproxy status`.
const (
	// StateUserspace: served in userspace, and not about to leave it.
	StateUserspace State = "userspace"
	// StateQualifying: served in userspace, offloaded when its reason is gone.
	StateQualifying State = "qualifying"
	// StateOffloaded: served by the kernel, or for a moment by userspace while
	// the kernel's rules catch up with a change.
	StateOffloaded State = "offloaded"
	// StateRecalled: taken back from the kernel, waiting out its back-off.
	StateRecalled State = "recalled"
	// StatePinned: kept in its data plane by a user.
	StatePinned State = "pinned"
	// StateRejecting: no usable endpoint, new connections are refused or dropped.
	StateRejecting State = "rejecting"
	// StateExcluded: left to another proxy, no rule of kproxy touches it.
	StateExcluded State = "excluded"
)

// Verdict says what happens to a new connection to a frontend.
type Verdict string

// The verdicts.
const (
	Forward Verdict = "forward"
	Reject  Verdict = "reject" // no usable endpoint anywhere: ICMP port unreachable
	Drop    Verdict = "drop"   // endpoints exist, but the traffic policy allows none here
)

// Kind says what sort of address a frontend is.
type Kind string

// The kinds of frontends.
const (
	ClusterIP    Kind = "cluster-ip"
	ExternalIP   Kind = "external-ip"
	LoadBalancer Kind = "load-balancer"
	NodePort     Kind = "node-port"
)

// Masquerade says for which clients the node's address replaces the client's
// on the way to an endpoint. Hairpin connections (an endpoint that reaches
// itself through its service) are masqueraded whatever the rule.
type Masquerade string

// The masquerade rules.
const (
	MasqueradeNever     Masquerade = "never"
	MasqueradeAlways    Masquerade = "always"
	MasqueradeUnlessPod Masquerade = "unless-pod"   // clients that aren't pods, see [Policy.IsPod]
	MasqueradeNodeLocal Masquerade = "node-clients" // clients that are this node itself
)

// Plan holds what every stage downstream carries out. Services are in key order.
type Plan struct {
	Time time.Time
	// Kernel are the kernel data planes that Policy.Mode leads to on this host, in order of
	// preference: a service gets the first of those that fall least short of what it
	// asks for. There is none in mode userspace.
	Kernel []DataPlane
	// TellsClients: there is a kernel data plane, and each one that may be used
	// chooses endpoints by client.
	TellsClients bool
	// Forwarding is what the plan takes the host to forward, as in Caps.
	Forwarding [2]Capability
	Node       service.Node
	Policy     Policy
	Services   []*Service

	// Wake is when time alone changes the plan; zero if it doesn't.
	Wake time.Time

	// What the next Compute may build on.
	snapshot  *service.Snapshot
	conflicts *conflicts
	kernel    kernelChoice
}

// Uses reports whether services may have rules of the kernel data plane d.
func (p *Plan) Uses(d DataPlane) bool { return slices.Contains(p.Kernel, d) }

// Preferred is the first of Kernel; None if there is none.
func (p *Plan) Preferred() DataPlane {
	if len(p.Kernel) == 0 {
		return None
	}
	return p.Kernel[0]
}

// Offloads reports whether there is a kernel data plane.
func (p *Plan) Offloads() bool { return len(p.Kernel) > 0 }

// Empty returns p without its services.
func (p *Plan) Empty() *Plan {
	return &Plan{Kernel: p.Kernel, TellsClients: p.TellsClients, Policy: p.Policy}
}

// Service is the decision for one service port.
type Service struct {
	Port      *service.Port
	Frontends []Frontend // in order of kind, then address
	// Groups are the usable endpoints per family; a family without frontends
	// has empty groups.
	Groups    [2]Groups
	Endpoints []Endpoint // all of them, usable or not, in address order
	Leaving   bool       // one of them leaves, see [Endpoint.Leaves]
	// Excluded are the families in which another proxy serves it; there are no
	// frontends in those.
	Excluded [2]bool

	DataPlane   DataPlane
	State       State
	Reason      string    // one line: why it is where it is
	Cause       Cause     // the same in a word
	QualifiesAt time.Time // when it is offloaded if nothing changes; zero if unknown
	Problems    []string  // what is wrong with its specification, a line each

	// Kernel is the kernel data plane that has rules for it, used while it is
	// offloaded and as fallback when kproxy is dead; None in mode userspace.
	Kernel DataPlane
	// KernelReason says why it is that one, where mode auto had to choose; empty
	// where the mode leaves no choice.
	KernelReason string
	// Scheduler is the one that Kernel chooses endpoints with; empty if it has none.
	Scheduler string
	// TellsClients: Kernel chooses endpoints by client, see [Service.ShortCircuits].
	TellsClients bool
	// Degraded says how Kernel falls short of the specification; empty if it doesn't.
	Degraded string
	// KernelHash identifies everything Kernel's rules depend on. Two plans
	// with the same hash need the same rules for this service.
	KernelHash uint64

	record *record
	entry  uint64 // the snapshot's hash of its specification and endpoints
}

// Groups are the endpoints one family's connections may go to.
type Groups struct {
	Cluster []Backend // for traffic policy Cluster
	Local   []Backend // for traffic policy Local
}

// Backend is a usable endpoint.
type Backend struct {
	Address netip.AddrPort
	Weight  uint32 // 0 takes no new connection
	Local   bool   // on this node
}

// Frontend is one address:port on which a service port answers.
type Frontend struct {
	Kind     Kind
	Family   service.Family
	Protocol service.Protocol
	// Address has the zero Addr for a NodePort: every local address of the family.
	Address netip.AddrPort
	// Verdict is for clients in general. Short-circuited clients may be forwarded
	// although it is Drop; see [Service.VerdictFor] and [Service.Serves].
	Verdict Verdict
	// Local: connections use the Local group, else the Cluster group.
	Local bool
	// ShortCircuit: clients on this node and pods use the Cluster group
	// although Local is set (externalTrafficPolicy Local).
	ShortCircuit bool
	Masquerade   Masquerade
	SourceRanges []netip.Prefix // clients allowed; empty allows all
}

// Endpoint is an endpoint with what is known of it, for status output. What its
// source says is the Snapshot's and isn't modified.
type Endpoint struct {
	*service.Endpoint
	*Probed // those that nothing is known of have the same
	Local   bool
	Usable  bool // gets new connections from some frontend
	// Excluded: another proxy serves it, in a network of Policy.ExcludeCIDRs.
	Excluded bool
}

// Probed holds what is known of an endpoint's health.
type Probed struct {
	Health string // "up", "down" or "unknown"
	Since  time.Time
	Error  string // of its last failed probe
	// Ejected says why it gets no connections although Health lets it; nil if it may.
	Ejected *health.Ejection
}

// Client describes where a connection comes from, as far as decisions need it.
type Client struct {
	Address netip.Addr
	Node    bool // it is one of this node's own addresses
	// Interface is what its packets come in on; empty if it isn't known, because
	// no detector goes by it, and for this node's own.
	Interface string
}
