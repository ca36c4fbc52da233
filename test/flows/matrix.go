package flows

import (
	_ "embed"
	"slices"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
)

//go:embed matrix.txtar
var text []byte

// Matrix is matrix.txtar.
type Matrix struct {
	Configurations []Configuration
	Hosts          []Host
	EndpointSets   []EndpointSet
	Services       []Service
	Rows           []Row
	Nowhere        []Nowhere
}

// Nowhere says what becomes of connections that are to no service.
type Nowhere struct {
	Line int
	To   string // otherPort or noService
	Want Verdict
}

// What they are to: a cluster IP by a port that no service has there, an address of the ServiceCIDRs that no
// service has.
const (
	otherPort = "other-port"
	noService = "no-service"
)

// Load returns the matrix of this package.
func Load() (*Matrix, error) { return Parse(text) }

// Configuration is one way to run kproxy, and the nodes that it runs on.
type Configuration struct {
	Name          string
	Topology      lab.Topology
	Detector      Detector
	MasqueradeAll bool
	OwnNodePorts  bool   // node ports are at the node's own addresses alone
	Hosts         []Host // besides one without any
}

// Host is something about a node's host that proxies may fail on.
type Host string

// The hosts.
const (
	Strict   Host = "strict"
	Marks    Host = "marks"
	Firewall Host = "firewall"
)

var knownHosts = []Host{Strict, Marks, Firewall}

// Detector says how kproxy tells pods from other clients.
type Detector string

// The detectors.
const (
	NoDetector      Detector = "none"
	ClusterCIDR     Detector = "cluster-cidr"
	InterfacePrefix Detector = "interface-prefix"
	Bridge          Detector = "bridge" // an interface by its whole name
)

var detectors = []Detector{NoDetector, ClusterCIDR, InterfacePrefix, Bridge}

// Args are the flags of kproxy in network n, where the pod that tries flows is behind
// an interface of the node.
func (c Configuration) Args(n *Network, behind string) []string {
	out := []string{"--service-cidr", lab.ServiceCIDR4.String(), "--service-cidr", lab.ServiceCIDR6.String()}
	switch c.Detector {
	case ClusterCIDR:
		for _, p := range n.Pods {
			out = append(out, "--cluster-cidr", p.String())
		}
	case InterfacePrefix:
		out = append(out, "--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", behind[:1])
	case Bridge:
		out = append(out, "--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", behind)
	}
	if c.MasqueradeAll {
		out = append(out, "--masquerade-all")
	}
	if c.OwnNodePorts {
		for _, p := range n.nodeNetworks() {
			out = append(out, "--nodeport-addresses", p.String())
		}
	}
	return out
}

// EndpointNames are the endpoints that a set has conditions for, in their order.
var EndpointNames = []string{"here", "here2", "there"}

// Nodes are the nodes that those are on.
var Nodes = map[string]string{"here": ThisNode, "here2": ThisNode, "there": "another"}

// ThisNode is the node that kproxy runs on, in ThisZone.
const (
	ThisNode = "node"
	ThisZone = "zone-a"
)

// EndpointSet describes the endpoints of a service, and what becomes of connections to them.
type EndpointSet struct {
	Name       string
	Conditions map[string]Condition // by endpoint; those that don't exist have none
	Cluster    Outcome              // of connections that policy Cluster is for
	Local      Outcome
}

// Condition is that of one endpoint: its three conditions as a Kubernetes object has
// them, and its hints.
type Condition struct {
	Ready, Serving, Terminating bool
	Zone, Node                  string // hints; empty without
}

// Verdict says what becomes of a connection.
type Verdict string

// The verdicts.
const (
	Serve  Verdict = "serve"
	Refuse Verdict = "refuse" // told at once
	Drop   Verdict = "drop"   // never told
)

// Outcome says what becomes of a connection and, if it is served, which endpoints may
// serve it.
type Outcome struct {
	Verdict   Verdict
	Endpoints []string
}

// Service is a service that is tried.
type Service struct {
	Number         int // from 1; makes its addresses
	Name           string
	Internal       Policy
	External       Policy
	Endpoints      *EndpointSet
	Admits         string // "everyone", or whom the load balancer's address admits
	Special        Special
	configurations []string
}

// Special names what a service has that others don't; empty for nothing.
type Special string

// What services have.
const (
	Ports    Special = "ports"    // a second port of each protocol, with another target port
	Slices   Special = "slices"   // an EndpointSlice for each endpoint, with another target port for one
	Affinity Special = "affinity" // session affinity by the client's address
	SCTP     Special = "sctp"     // it speaks SCTP
)

var specials = []Special{Ports, Slices, Affinity, SCTP}

// Protocols returns the protocols that the service speaks.
func (s *Service) Protocols() []service.Protocol {
	if s.Special == SCTP {
		return []service.Protocol{service.SCTP}
	}
	return []service.Protocol{service.TCP, service.UDP}
}

// Ports returns how many ports the service has for each protocol.
func (s *Service) Ports() int {
	if s.Special == Ports {
		return 2
	}
	return 1
}

// Target returns the index in [Network.TargetPorts] of the target port that the endpoint called name has for a port.
func (s *Service) Target(name string, port int) int {
	if port > 0 || s.Special == Slices && name == "there" {
		return 1
	}
	return 0
}

// Policy is a traffic policy.
type Policy string

// The policies, as Kubernetes spells them.
const (
	Cluster Policy = "Cluster"
	Local   Policy = "Local"
)

// Kind is a kind of address of a service.
type Kind string

// The kinds, and what rows call all those that aren't ClusterIP.
const (
	ClusterIP    Kind = "cluster-ip"
	NodePort     Kind = "node-port"
	ExternalIP   Kind = "external-ip"
	LoadBalancer Kind = "load-balancer"

	external = "external"
	admits   = "admits-"
)

// Kinds are all kinds.
var Kinds = []Kind{ClusterIP, NodePort, ExternalIP, LoadBalancer}

// From says where a connection comes from.
type From string

// The origins, in the order of a row's cells.
const (
	Pod       From = "pod"
	Node      From = "node"
	Localhost From = "localhost"
	Outside   From = "outside"
)

// Froms are all origins.
var Froms = []From{Pod, Node, Localhost, Outside}

// Row says what becomes of connections to a kind of address.
type Row struct {
	Line           int
	To             string // a Kind, or external, or admits-…
	Policy         Policy
	configurations []string
	Cells          map[From]Cell
}

// Cell says what becomes of connections from one origin.
type Cell struct {
	Exists bool   // there is such a connection
	Drop   bool   // whatever the endpoints
	Policy Policy // whose endpoints it may use
	Source Source
}

// Source says which source address an endpoint sees.
type Source string

// The sources.
const (
	AsClient Source = "client"
	AsNode   Source = "node"
)

// applies reports whether a list of configurations names c.
func applies(configurations []string, c Configuration) bool {
	return slices.Contains(configurations, "*") || slices.Contains(configurations, c.Name)
}

// OnEveryHost reports whether the service is tried on each host of a configuration,
// besides the one that has nothing about it.
func (s *Service) OnEveryHost() bool { return slices.Contains(s.configurations, "*") }

// In reports whether the service is tried in c.
func (s *Service) In(c Configuration) bool { return applies(s.configurations, c) }
