package kernel

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/service"
)

// Prefix begins the name of every chain and set that kproxy makes. Whatever doesn't
// begin with it is foreign and never touched.
const Prefix = "KPROXY-"

// Longest names the kernel takes: XT_EXTENSION_MAXNAMELEN and IPSET_MAXNAMELEN,
// each without its final NUL.
const (
	MaxChainName = 28
	MaxSetName   = 31
)

// Own reports whether an object of this name is kproxy's.
func Own(name string) bool { return strings.HasPrefix(name, Prefix) }

// Hash is the 16 characters that stand for a service port in object names: base32
// of SHA-256, as in kube-proxy, so that two services never share one by accident.
// Further parts tell apart several objects of one kind.
func Hash(k service.Key, parts ...string) string {
	h := sha256.Sum256([]byte(strings.Join(append([]string{k.Namespace, k.Name, k.Port, k.Protocol.String()}, parts...), "\x00")))
	return base32.StdEncoding.EncodeToString(h[:10])
}

// ChainName names a chain of service port k: "KPROXY-SVC-<hash>". The kind has
// three letters at most.
func ChainName(kind string, k service.Key) string { return Prefix + kind + "-" + Hash(k) }

// AffinitySet names the set of clients that stay with an endpoint of k.
func AffinitySet(k service.Key, endpoint netip.AddrPort) string {
	return Prefix + "AFF-" + Hash(k, endpoint.String())
}

func isAffinitySet(name string) bool { return strings.HasPrefix(name, Prefix+"AFF-") }

// The shared sets; those with a family end in "-4" or "-6".
const (
	SetAlive    = Prefix + "ALIVE"    // everyone, while a live kproxy serves
	SetStarting = Prefix + "STARTING" // everyone, while a kproxy starts that will serve
	SetHeld     = Prefix + "HELD"     // connections that userspace carries, of services that the kernel has
	SetLet      = Prefix + "LET"      // endpoints whose refusals clients are told of
	SetUser     = Prefix + "USER"     // service addresses served in userspace
	SetLocal    = Prefix + "LOCAL"    // every forwarding node port
	SetReject   = Prefix + "REJECT"   // refused
	SetDrop     = Prefix + "DROP"     // dropped
	SetRanged   = Prefix + "RANGED"   // addresses that only some clients may use
	SetAllow    = Prefix + "ALLOW"    // which clients may use which of them
	SetPods     = Prefix + "PODS"     // the pod networks
	SetNodes    = Prefix + "NODES"    // networks of the node's addresses that node ports answer on
	SetEndpoint = Prefix + "ENDPOINT" // endpoints, for hairpin and forwarding rules
	SetShort    = Prefix + "SHORT"    // addresses that pods and this node use by way of userspace
	SetLeaving  = Prefix + "LEAVING"  // endpoints that get no new connections
	SetCluster  = Prefix + "CLUSTER"  // cluster IPs that services have
	SetLeft     = Prefix + "LEFT"     // addresses that another proxy serves, or rules of the kernel
	SetHealth   = Prefix + "HEALTH"   // ports at which load balancers ask for a Service's health
)

// The sets of virtual servers; each ends in "-4" or "-6".
const (
	SetVirtual  = Prefix + "VIRTUAL"   // the virtual servers that are kproxy's
	SetVIP      = Prefix + "VIP"       // the addresses on [DummyLink]
	SetDrain    = Prefix + "DRAIN"     // real servers that drain, and how long yet
	SetMasqAll  = Prefix + "MASQ-ALL"  // service addresses all of whose clients are masqueraded
	SetMasqNet  = Prefix + "MASQ-NET"  // those whose clients outside the pod networks are
	SetMasqNode = Prefix + "MASQ-NODE" // those whose clients on this node are
)

// FamilySet names the set of family f: "KPROXY-USER-4".
func FamilySet(base string, f service.Family) string {
	if f == service.IPv6 {
		return base + "-6"
	}
	return base + "-4"
}

// NodePortSet names the set of node ports of protocol p in family f:
// "KPROXY-USER-NP-TCP-4". To the kernel a bitmap of ports has no family.
func NodePortSet(base string, p service.Protocol, f service.Family) string {
	return FamilySet(base+"-NP-"+strings.ToUpper(p.String()), f)
}

// AddressEntry is an entry of a hash:ip,port set as `ipset save` prints it.
func AddressEntry(p service.Protocol, a netip.AddrPort) string {
	return string(appendAddressEntry(make([]byte, 0, 64), p, a))
}

func appendAddressEntry(b []byte, p service.Protocol, a netip.AddrPort) []byte {
	b = append(append(append(a.Addr().AppendTo(b), ','), p.String()...), ':')
	return strconv.AppendUint(b, uint64(a.Port()), 10)
}

// EndpointEntry is an endpoint's entry in SetEndpoint.
func EndpointEntry(p service.Protocol, a netip.AddrPort) string {
	b := append(appendAddressEntry(make([]byte, 0, 112), p, a), ',')
	return string(a.Addr().AppendTo(b))
}

// someNames is how many names a message lists before it only counts.
const someNames = 3

// Some fills in names, or the first of many; there is no phrase without any.
func Some(format string, names []string) []string {
	if len(names) == 0 {
		return nil
	}
	text := strings.Join(names[:min(len(names), someNames)], ", ")
	if more := len(names) - someNames; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return []string{fmt.Sprintf(format, text)}
}
