package netfilter

import (
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/service"
)

const turns = `*nat
:PREROUTING ACCEPT [0:0]
:KPROXY-SVC - [0:0]
[7:420] -A PREROUTING -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KPROXY-SVC
[3:180] -A KPROXY-SVC -p tcp -m statistic --mode nth --every 3 --packet 0 -j DNAT --to-destination 10.2.0.2:8080
[2:120] -A KPROXY-SVC -p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.3.0.2:8080
[2:120] -A KPROXY-SVC -p tcp -j DNAT --to-destination 10.2.0.2:8080
COMMIT
`

func TestChoicesInTurn(t *testing.T) {
	tables, err := Parse(service.IPv4, "nft", turns)
	if err != nil {
		t.Fatal(err)
	}
	w := tables.Walk(NewPacket(service.TCP, netip.MustParseAddrPort("10.1.0.2:40000"), netip.MustParseAddrPort("10.96.0.1:80"), "eth0"), Prerouting, Whole)
	c := w.Choices()
	if len(c) != 2 || c[0].Probability < 0.666 || c[0].Probability > 0.667 || !c[0].Certain || *c[0].Packets != 5 || c[1].Probability > 0.334 {
		t.Errorf("choices are %+v", c)
	}
	if v := w.Verdict(); v != Accept {
		t.Errorf("verdict is %s", v)
	}
}

// TestBridgePorts: where bridged packets don't pass netfilter, none has a port.
func TestBridgePorts(t *testing.T) {
	tables, err := Parse(service.IPv4, "nft", `*filter
:FORWARD DROP [0:0]
-A FORWARD -m physdev --physdev-is-bridged -j ACCEPT
-A FORWARD -p udp -m physdev ! --physdev-is-in -j REJECT
COMMIT
`)
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

// TestWayBack: by which interface a packet back leaves isn't known where it is known only whether
// that is the one that this packet came in on, nor where a mark may route it elsewhere.
func TestWayBack(t *testing.T) {
	for _, c := range []struct {
		flags, to string
		mark      uint32
		want      Verdict
	}{
		{`["saddr", "iif"]`, `true`, 1, Drop}, {`["saddr", "iif"]`, `false`, 1, Accept}, {`["saddr", "iif"]`, `"eth0"`, 0, Unknown},
		{`["saddr", "mark", "iif"]`, `false`, 0, Accept}, {`["saddr", "mark", "iif"]`, `false`, 1, Unknown},
	} {
		tables, err := Parse(service.IPv4, "nft", "")
		if err != nil {
			t.Fatal(err)
		}
		list := `{"nftables": [{"chain": {"family": "ip", "table": "t", "name": "c", "type": "filter", "hook": "prerouting", "prio": 0}},
			{"rule": {"family": "ip", "table": "t", "chain": "c", "handle": 1, "expr": [
				{"match": {"op": "==", "left": {"fib": {"result": "oif", "flags": ` + c.flags + `}}, "right": ` + c.to + `}}, {"drop": null}]}}]}`
		if err := tables.ParseNFT([]byte(list), ""); err != nil {
			t.Fatal(err)
		}
		p := NewPacket(service.TCP, netip.MustParseAddrPort("10.1.0.2:40000"), netip.MustParseAddrPort("10.2.0.2:80"), "eth0")
		p.Reversed, p.Mark = Yes, c.mark
		if got := tables.Walk(p, Prerouting, Whole).Verdict(); got != c.want {
			t.Errorf("%s is %s, mark %d: %s, want %s", c.flags, c.to, c.mark, got, c.want)
		}
	}
}
