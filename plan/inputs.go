package plan

import (
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// Mode is the furthest data plane a service may reach (flag --mode).
type Mode string

// The modes.
const (
	ModeUserspace Mode = "userspace"
	ModeIPTables  Mode = "iptables"
	ModeIPVS      Mode = "ipvs"
	ModeNFTables  Mode = "nftables"
	ModeAuto      Mode = "auto"
)

// Allows reports whether services may get rules of the kernel data plane d.
func (m Mode) Allows(d DataPlane) bool { return m == ModeAuto || m.Needs(d) }

// Needs reports whether the mode can't do without d.
func (m Mode) Needs(d DataPlane) bool { return string(m) == string(d) }

// Inputs is everything Compute knows. It keeps none of the maps.
type Inputs struct {
	Now      time.Time
	Snapshot *service.Snapshot
	Health   *health.View
	Ejected  *health.Ejections
	Caps     Caps
	Policy   Policy
	Observed Observed
	Failed   map[service.Key]Failure // programming failures, per service port
	// Pins are wishes made with `kproxy pin`. They override the annotation, also
	// where the pin is "auto".
	Pins map[service.Key]service.Preference
	// Dirty are the service ports of which Observed.Carried, Observed.Programmed,
	// Failed, Pins or Ejected may say something else than for the previous plan. If it is nil,
	// they may for any, and Health may be another.
	Dirty map[service.Key]bool
}

// Policy is configuration that decisions depend on.
type Policy struct {
	Mode                  Mode
	OffloadAfter          time.Duration // steady this long before offload; 0 at once
	OffloadMinConnections uint64        // carried this many before offload
	DrainedBy             string        // what wants userspace to get no new connections that the kernel can take, pins or not; empty for nothing
	BackoffMax            time.Duration // longest wait before requalifying
	FlapLimit             int           // more health transitions than this within a minute recall
	MasqueradeAll         bool
	PodCIDRs              []netip.Prefix // local-traffic detector; empty means none configured
	// PodBridge and PodInterfacePrefix are the detectors that go by the interface
	// a packet comes in on: that of this name, those whose names begin so. Empty
	// where none is configured; at most one of the three detectors is.
	PodBridge, PodInterfacePrefix string
	// NodePodCIDRs is the detector that goes by the pod networks of the Node
	// object: Compute puts those into PodCIDRs.
	NodePodCIDRs bool
	// NodePortNetworks limits the node's addresses that node ports answer on; see
	// [Policy.NodePortsWithin]. With PrimaryNodePorts, Compute adds the addresses
	// of the Node object, and a family without any answers nowhere.
	NodePortNetworks []netip.Prefix
	PrimaryNodePorts bool
	// NoLocalhostNodePorts: node ports don't answer on loopback addresses.
	NoLocalhostNodePorts bool
	// ExcludeCIDRs are networks of endpoints that another proxy serves.
	ExcludeCIDRs []netip.Prefix
	// CloseClusterIPs: what is to a cluster IP by a port that no Service has there is refused, and what is to an address in
	// ServiceCIDRs that no Service has is dropped, as in kube-proxy's mode nftables. Compute adds the snapshot's networks to
	// ServiceCIDRs, and sorts them.
	CloseClusterIPs bool
	ServiceCIDRs    []netip.Prefix
	// Links are networks that the node is directly connected to and whose hosts
	// answer each other without passing it. Where client and endpoint are in
	// one, the connection is masqueraded, or the answers would never come back.
	Links []netip.Prefix
	// BridgedLinks are networks behind bridges of the node's own whose packets pass
	// netfilter, as is usual on Kubernetes nodes: rules that rewrite what a client
	// sends rewrite the answers too, but an answer to a client's address is bridged
	// to the client, never to a socket of the node's that bears that address ([StandIn]).
	BridgedLinks []netip.Prefix
	// NoStandIns: the host has no NETMAP, or filters what sockets send before that.
	NoStandIns bool
	// NodeAddresses are the node's own, sorted: those of every link that is up but
	// loopback and kproxy's own, and no link-local ones.
	NodeAddresses []netip.Addr
}

// ownAddress reports whether a is one of the node's own, service addresses aside.
func (p *Policy) ownAddress(a netip.Addr) bool {
	_, own := slices.BinarySearchFunc(p.NodeAddresses, a, netip.Addr.Compare)
	return own
}

// Capability is one thing this host can or can't do.
type Capability struct {
	Name      string `json:"name"`
	Supported bool   `json:"supported"`
	Reason    string `json:"reason"` // why not, and how to get it; or the version found
}

// Caps are facts about this host, given as input: found out once at start, but
// for Forwarding, which an administrator may change.
type Caps struct {
	// Planes are the kernel data planes that kproxy has, whether this host has them or
	// not. Mode auto prefers the first.
	Planes []Abilities
	// PassedOver says why mode auto uses none of the data planes that it prefers to those;
	// empty if there are none.
	PassedOver string
	// Forwarding is per family whether the host passes on packets of others;
	// the zero Capability counts as supported. Its Reason names the setting.
	Forwarding [2]Capability
	All        []Capability // every probe, for status
}

// Plane returns the abilities of d; the zero value for one that isn't there.
func (c *Caps) Plane(d DataPlane) Abilities {
	for _, a := range c.Planes {
		if a.Plane == d {
			return a
		}
	}
	return Abilities{}
}

// Observed holds what the data planes report back.
type Observed struct {
	// Carried counts successful connections and sessions since start.
	Carried map[service.Key]uint64
	// Programmed is the KernelHash of the rules that are in the kernel now, service
	// port by service port. Rules that may be changing aren't there.
	Programmed map[service.Key]uint64
	// InStep: the kernel holds all rules of the last plan, but those that failed. Those of the next come with
	// it, where a data plane is [Abilities.Atomic].
	InStep bool
	// Adopted are service ports found offloaded when kproxy started; they stay so.
	Adopted map[service.Key]bool
}

// Failure is a service port whose kernel rules could not be programmed.
type Failure struct {
	Since  time.Time // a later time is another failure and doubles the back-off
	Reason string
	Hash   uint64 // KernelHash that failed; a new specification is tried at once
}

// DefaultPolicy returns the defaults of the flags.
func DefaultPolicy() Policy {
	return Policy{
		Mode: ModeAuto, OffloadAfter: 10 * time.Second, OffloadMinConnections: 1,
		BackoffMax: 10 * time.Minute, FlapLimit: 3,
	}
}
