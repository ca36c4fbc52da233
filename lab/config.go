package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"regexp"
	"slices"
)

// MaxBackends and MaxClients bound a lab; both come from the /24 that holds
// the addresses.
const (
	MaxBackends = 250
	MaxClients  = 250
)

// DefaultPrefix begins the names of the namespaces of `kproxy lab`.
const DefaultPrefix = "kproxy-lab"

// The networks of every lab. Labs don't see each other, so all use the same.
var (
	ClientCIDR4  = netip.MustParsePrefix("10.1.0.0/24")
	ClientCIDR6  = netip.MustParsePrefix("fd00:1::/64")
	PodCIDR4     = netip.MustParsePrefix("10.2.0.0/24")
	PodCIDR6     = netip.MustParsePrefix("fd00:2::/64")
	ServiceCIDR4 = netip.MustParsePrefix("10.96.0.0/12")
	ServiceCIDR6 = netip.MustParsePrefix("fd00:96::/112")
)

// Topology says how a node lays out the links of its pods: each one is that of network plugins
// whose nodes kproxy is for.
type Topology string

// The topologies. In each of them pods have the same addresses, and what they send
// outside their own network comes by the node.
const (
	// Routed is a veth for each pod, whose end on the node has an address, and a
	// route to each pod (kindnet, and others that use the CNI plugin ptp).
	Routed Topology = "routed"
	// Bridge is one network for all pods, behind [BridgeLink] (flannel, and others
	// that use the CNI plugin bridge). Pods reach each other past the node's routes.
	Bridge Topology = "bridge"
	// Unnumbered is a veth for each pod, whose end on the node has no address but
	// that of IPv6's link-local scope, and answers for all others by proxy ARP
	// (Calico, AWS VPC CNI).
	Unnumbered Topology = "unnumbered"
	// Loopback is Unnumbered with a gateway that has an address, on another link of
	// the node's (Cilium without its proxy).
	Loopback Topology = "loopback"
)

// Topologies are all topologies.
var Topologies = []Topology{Routed, Bridge, Unnumbered, Loopback}

// BridgeLink is what the bridge of [Bridge] is called on the node.
const BridgeLink = "cni0"

// PodLink returns the link on which the node receives the packets of a pod; name is
// that of the pod's own link.
func (t Topology) PodLink(name string) string {
	if t == Bridge {
		return BridgeLink
	}
	return name
}

// Config describes a lab. Start from [DefaultConfig].
type Config struct {
	Prefix     string // of the namespaces' names; two labs at a time need two prefixes
	Topology   Topology
	Backends   int  // backend namespaces, 0 to MaxBackends
	Clients    int  // addresses of the client namespace, 1 to MaxClients
	IPv6       bool // dual stack; the host's kernel must have IPv6
	HostAccess bool // a link from the caller's namespace to the node
}

// DefaultConfig returns what `kproxy lab` uses: three backends with routed links,
// one client address, dual stack, nothing on the host.
func DefaultConfig() Config {
	return Config{Prefix: DefaultPrefix, Topology: Routed, Backends: 3, Clients: 1, IPv6: true}
}

var prefixPattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$`)

// Validate reports every problem of the configuration.
func (c Config) Validate() error {
	var errs []error
	if !prefixPattern.MatchString(c.Prefix) {
		errs = append(errs, fmt.Errorf("prefix %q is not of lower-case letters, digits and inner dashes", c.Prefix))
	}
	if !slices.Contains(Topologies, c.Topology) {
		errs = append(errs, fmt.Errorf("topology %q is none of %v", c.Topology, Topologies))
	}
	if c.Backends < 0 || c.Backends > MaxBackends {
		errs = append(errs, fmt.Errorf("%d backends are not between 0 and %d", c.Backends, MaxBackends))
	}
	if c.Clients < 1 || c.Clients > MaxClients {
		errs = append(errs, fmt.Errorf("%d client addresses are not between 1 and %d", c.Clients, MaxClients))
	}
	return errors.Join(errs...)
}

// nth returns the address of p that is n after its network address.
func nth(p netip.Prefix, n int) netip.Addr {
	a := p.Masked().Addr()
	for range n {
		a = a.Next()
	}
	return a
}

// NodeAddresses are the node's addresses that the client sees, IPv4 then IPv6.
func (c Config) NodeAddresses() []netip.Addr { return c.nth(ClientCIDR4, ClientCIDR6, 1) }

// ClientAddresses are the addresses of the i-th client, i from 0.
func (c Config) ClientAddresses(i int) []netip.Addr { return c.nth(ClientCIDR4, ClientCIDR6, 2+i) }

// nth returns the n-th address of each network, of IPv4's alone without IPv6.
func (c Config) nth(four, six netip.Prefix, n int) []netip.Addr {
	if !c.IPv6 {
		return []netip.Addr{nth(four, n)}
	}
	return []netip.Addr{nth(four, n), nth(six, n)}
}

// PodGateways are the addresses that the node has in the networks of pods, IPv4 then
// IPv6; none if [Unnumbered].
func (c Config) PodGateways() []netip.Addr {
	if c.Topology == Unnumbered {
		return nil
	}
	return c.backendAddresses(0)
}

// backendAddresses are the addresses of the i-th backend, i from 1; those of 0 are
// the node's, where it has any there.
func (c Config) backendAddresses(i int) []netip.Addr { return c.nth(PodCIDR4, PodCIDR6, 1+i) }

// hostSubnet picks the /30 of 198.18.0.0/15 between host and node. The default
// prefix gets the first, so what `kproxy lab` prints is always the same.
func (c Config) hostSubnet() netip.Prefix {
	const subnets = 1 << (30 - 15)
	var i uint32
	if c.Prefix != DefaultPrefix {
		i = 1 + c.hash()%(subnets-1)
	}
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], 198<<24|18<<16+i*4)
	return netip.PrefixFrom(netip.AddrFrom4(b), 30)
}

// hostLink is the name of the link in the caller's namespace. Names of links
// end at 15 bytes, so a prefix doesn't fit.
func (c Config) hostLink() string { return fmt.Sprintf("klab%08x", c.hash()) }

func (c Config) hash() uint32 {
	h := fnv.New32a()
	h.Write([]byte(c.Prefix))
	return h.Sum32()
}
