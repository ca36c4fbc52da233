package service

import (
	"net/netip"
	"strings"
	"time"
)

// Algorithm says how an endpoint is chosen for a new connection
// (annotation kproxy.dev/algorithm).
type Algorithm string

// The algorithms, spelled as in the annotation.
const (
	RoundRobin         Algorithm = "round-robin"
	WeightedRoundRobin Algorithm = "weighted-round-robin"
	LeastConnections   Algorithm = "least-connections"
	Random             Algorithm = "random"
	SourceHash         Algorithm = "source-hash"
	Maglev             Algorithm = "maglev"
)

// Algorithms lists every algorithm, the default first.
var Algorithms = []Algorithm{RoundRobin, WeightedRoundRobin, LeastConnections, Random, SourceHash, Maglev}

// maxScheduler is IP_VS_SCHEDNAME_MAXLEN of include/uapi/linux/ip_vs.h without
// its NUL.
const maxScheduler = 15

// IsScheduler reports whether name can be that of a scheduler of IPVS. Which
// there are depends on the kernel's modules.
func IsScheduler(name string) bool {
	return name != "" && len(name) <= maxScheduler && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_' && r != '-'
	})
}

// Preference is a user's wish for a service's data plane
// (annotation kproxy.dev/dataplane and command `kproxy pin`).
type Preference string

// The preferences, spelled as in the annotation.
const (
	PreferAuto      Preference = "auto"
	PreferUserspace Preference = "userspace"
	PreferKernel    Preference = "kernel"
)

// Check is the kind of an active health check (annotation kproxy.dev/health-check).
type Check string

// The kinds, spelled as in the annotation. CheckDefault leaves the choice to
// `--health-check`.
const (
	CheckDefault Check = ""
	CheckOff     Check = "off"
	CheckTCP     Check = "tcp"
	CheckHTTP    Check = "http"
	CheckUDP     Check = "udp"
	CheckGRPC    Check = "grpc"
)

// HealthCheck says how a service's endpoints are probed. Zero fields mean the
// default of the flags --health-*. It is comparable: endpoints that several
// services probe alike share one probe.
type HealthCheck struct {
	Kind     Check
	Path     string        // HTTP path, or gRPC service name
	Port     uint16        // 0: the endpoint's own port
	Interval time.Duration // between two probes of an endpoint
	Timeout  time.Duration // of one probe
	Rise     int           // successes in a row that make an endpoint up
	Fall     int           // failures in a row that make it down
}

// ProxyProtocol is the PROXY protocol version sent to endpoints; 0 for none.
type ProxyProtocol uint8

// Port is one port of one Service, as its users wrote it. All slices are
// sorted and free of duplicates. A Port is immutable once it is in a Snapshot.
type Port struct {
	Key
	Created time.Time // of the Service; the older one wins a contested address

	Number   uint16 // the port clients connect to on every service address
	NodePort uint16 // the port on the node's own addresses; 0 for none

	ClusterIPs      []netip.Addr
	ExternalIPs     []netip.Addr
	LoadBalancerIPs []netip.Addr   // status.loadBalancer.ingress with ipMode VIP or none
	SourceRanges    []netip.Prefix // loadBalancerSourceRanges; empty allows all

	// ExternallyAccessible is true for types NodePort and LoadBalancer and for
	// Services with external IPs; only then does the external policy matter.
	ExternallyAccessible bool
	InternalLocal        bool          // internalTrafficPolicy: Local
	ExternalLocal        bool          // externalTrafficPolicy: Local
	HealthCheckNodePort  uint16        // 0 for none
	Affinity             time.Duration // ClientIP affinity time-out, sliding; 0 for none

	Algorithm      Algorithm
	AlgorithmGiven bool   // Algorithm was asked for; else it is the default
	Scheduler      string // a scheduler of IPVS instead of Algorithm's; empty for that
	Prefer         Preference
	Health         HealthCheck
	ProxyProtocol  ProxyProtocol
	ConnectTimeout time.Duration // userspace: per dial; 0 for the default (1s)
	Retries        int           // userspace: further endpoints tried; -1 for the default (3)
	IdleTimeout    time.Duration // userspace; 0 for the default (TCP none, UDP 60s)
	Responses      int           // userspace, UDP: answers to each datagram, the last of which ends its session; 0: that isn't known, -1: for the default

	// Problems are annotations that were not understood, one sentence each.
	// The Port is served as without them.
	Problems []string

	Source string // "file:line" where it was read; empty for the API server
}

// UDPResponses returns how many answers each datagram has; 0 where that isn't known. DNS has one (RFC 1035, section 4.2.1).
func (p *Port) UDPResponses() int {
	switch {
	case p.Responses >= 0:
		return p.Responses
	case p.Number == 53:
		return 1
	}
	return 0
}

// Endpoint is one address that serves a Port.
type Endpoint struct {
	Address     netip.AddrPort
	Node        string // the node it runs on; empty if unknown
	Hints       *Hints // who should use it; nil for none
	Weight      uint16 // 1 unless annotated; 0 drains
	Ready       bool
	Serving     bool
	Terminating bool
}

// Hints say who should use an endpoint.
type Hints struct {
	Zones []string // sorted; empty for no hint
	Nodes []string // sorted; empty for no hint
}

// ZoneHints are the zones that should use e; none for no hint.
func (e *Endpoint) ZoneHints() []string {
	if e.Hints == nil {
		return nil
	}
	return e.Hints.Zones
}

// NodeHints are the nodes that should use e; none for no hint.
func (e *Endpoint) NodeHints() []string {
	if e.Hints == nil {
		return nil
	}
	return e.Hints.Nodes
}

// MaxWeight bounds an endpoint's weight.
const MaxWeight = 1000

// Node is the node this kproxy runs on.
type Node struct {
	Name      string
	Zone      string         // label topology.kubernetes.io/zone
	Addresses []netip.Addr   // its internal addresses, as far as known
	PodCIDRs  []netip.Prefix // of the pods on this node
}
