package netfilter

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

const turns = `*nat
:PREROUTING ACCEPT [0:0]
:KPROXY-SVC - [0:0]
[7:420] -A PREROUTING -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KPROXY-SVC
[3:180] -A KPROXY-SVC -p tcp -m statistic --mode nth --every 3 --packet 0 -j DNAT --to-destination 10.2.0.2:8080
[2:120] -A KPROXY-SVC -p tcp -m statistic --mode nth ! --every 4 --packet 0 -j DNAT --to-destination 10.3.0.2:8080
[2:120] -A KPROXY-SVC -p tcp -j DNAT --to-destination 10.2.0.2:8080
COMMIT
`

func TestChoicesInTurn(t *testing.T) {
	tables, err := Parse(service.IPv4, turns, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	w := tables.Walk(NewPacket(service.TCP, netip.MustParseAddrPort("10.1.0.2:40000"), netip.MustParseAddrPort("10.96.0.1:80"), "eth0"), Prerouting, Whole)
	c := w.Choices()
	if len(c) != 2 || c[0].Probability < 0.499 || c[0].Probability > 0.501 || !c[0].Certain || *c[0].Packets != 5 || c[1].Probability > 0.501 {
		t.Errorf("choices are %+v", c)
	}
	if v := w.Verdict(); v != Accept {
		t.Errorf("verdict is %s", v)
	}
}

// TestBridgePorts: where bridged packets don't pass netfilter, none has a port.
func TestBridgePorts(t *testing.T) {
	tables, err := Parse(service.IPv4, `*filter
:FORWARD DROP [0:0]
-A FORWARD -m physdev --physdev-is-bridged -j ACCEPT
-A FORWARD -p udp -m physdev ! --physdev-is-in -j REJECT
COMMIT
`, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		proto   service.Protocol
		bridged Answer
		want    Verdict
	}{{service.TCP, No, Drop}, {service.UDP, No, Reject}, {service.TCP, Maybe, Unknown}} {
		tables.bridged = c.bridged
		p := NewPacket(c.proto, netip.MustParseAddrPort("10.1.0.2:40000"), netip.MustParseAddrPort("10.2.0.2:80"), "eth0")
		if got := tables.Walk(p, Forward, Whole).Verdict(); got != c.want {
			t.Errorf("%s, bridged %s: %s, want %s", c.proto, c.bridged, got, c.want)
		}
	}
}

// TestDevicesByPrefix: a chain on devices whose names begin alike (nft prints device "veth*") meets the packets of each of them.
func TestDevicesByPrefix(t *testing.T) {
	b := decodeChain("netdev", netlink.AppendNested(nil, unix.NFTA_CHAIN_HOOK, func(b []byte) []byte {
		b = netlink.AppendUint32(netlink.AppendUint32(b, unix.NFTA_HOOK_HOOKNUM, 0), unix.NFTA_HOOK_PRIORITY, 0)
		return netlink.AppendNested(b, hookDevices, func(b []byte) []byte {
			return netlink.Append(netlink.AppendText(b, 1, "eth1"), devicePrefix, []byte("veth")...)
		})
	}))
	tables := &Tables{Bases: []*Base{b}}
	for device, want := range map[string]int{"veth": 1, "veth3f": 1, "eth1": 1, "eth10": 0, "vet": 0, "": 0} {
		if got := len(tables.onDevice(Ingress, device)); got != want {
			t.Errorf("packets of %q meet %d chains, want %d", device, got, want)
		}
	}
}

// vague is a host that knows nothing.
type vague struct{}

func (vague) AddressType(netip.Addr) (string, error) { return "", errors.New("unknown") }
func (vague) InterfaceAddress(string, service.Family) (a netip.Addr, err error) {
	return a, errors.New("unknown")
}
func (vague) MasqueradeAddress(string, netip.Addr) (a netip.Addr, err error) {
	return a, errors.New("unknown")
}
func (vague) Listens(service.Protocol, netip.AddrPort) (s Socket, err error) {
	return s, errors.New("unknown")
}

// FuzzNFTRule: whatever expressions a rule of nftables seems to have are read, and a walk ends.
func FuzzNFTRule(f *testing.F) {
	expression := func(name string, attributes ...byte) []byte {
		return netlink.AppendNested(nil, 1, func(b []byte) []byte {
			b = netlink.AppendText(b, unix.NFTA_EXPR_NAME, name)
			return netlink.AppendNested(b, unix.NFTA_EXPR_DATA, func(b []byte) []byte { return append(b, attributes...) })
		})
	}
	for _, name := range []string{"payload", "meta", "ct", "fib", "socket", "numgen", "immediate", "cmp", "range", "bitwise", "byteorder", "lookup", "dynset", "nat", "masq", "redir", "tproxy", "hash", "reject", "objref", "limit", "match", "target", "exthdr", "queue"} {
		f.Add(expression(name))
		f.Add(append(expression(name, netlink.AppendUint32(netlink.AppendUint32(nil, 1, 8), 2, 4)...), expression("cmp", netlink.AppendUint32(nil, 1, 8)...)...))
	}
	f.Fuzz(func(t *testing.T, expressions []byte) {
		set := &ruleset{source: sourceNFT, family: service.IPv4, chains: map[string]*chain{}, nft: &nftTable{name: "x", sets: map[string]*nftSet{}}}
		c := &chain{table: "ip x", name: "y", rules: []*rule{decodeRule(set, attributes{unix.NFTA_RULE_EXPRESSIONS: expressions})}}
		set.chains["ip x y"] = c
		tables := &Tables{host: vague{}, Bases: []*Base{{Source: sourceNFT, Table: "ip x", Chain: "y", Type: "filter", Hook: Prerouting, Policy: Accept, set: set}}}
		p := NewPacket(service.TCP, netip.MustParseAddrPort("10.1.0.2:40000"), netip.MustParseAddrPort("10.2.0.2:80"), "eth0")
		if w := tables.Walk(p, Prerouting, Whole); len(w.Outcomes) == 0 {
			t.Fatal("a packet has no outcome")
		}
	})
}
