package kernel

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// refusedPacket returns the beginning of a packet from port 4000 to port 80: an IP header with so many bytes of options, which
// IPv6 has none of, and the ports.
func refusedPacket(client, address string, protocol service.Protocol, options int) []byte {
	from, to := netip.MustParseAddr(client), netip.MustParseAddr(address)
	var b []byte
	if from.Is4() { // RFC 791
		b = make([]byte, 12, 64)
		b[0], b[9] = 4<<4|byte(5+options/4), byte(protocol)
	} else { // RFC 8200
		b = make([]byte, 8, 64)
		b[0], b[6] = 6<<4, byte(protocol)
	}
	b = append(append(append(b, from.AsSlice()...), to.AsSlice()...), make([]byte, options)...)
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, 4000), 80)
}

// refusalMessage is the body of a message of nfnetlink_log.
func refusalMessage(packet []byte) []byte {
	return netlink.Append(netlink.AppendText(netlink.AppendNetfilter(nil, 0), logPrefix, ReasonNoEndpoint), logPayload, packet...)
}

func TestRefusalOf(t *testing.T) {
	refused := func(protocol service.Protocol, client, address string) *Refusal {
		return &Refusal{protocol, netip.MustParseAddrPort(client), netip.MustParseAddrPort(address), ReasonNoEndpoint}
	}
	tcp4, icmp := refusedPacket("10.1.0.2", "10.96.0.10", service.TCP, 0), refusedPacket("10.1.0.2", "10.96.0.10", 1, 0)
	options, udp6 := refusedPacket("10.1.0.2", "10.96.0.10", service.TCP, 40), refusedPacket("fd01::2", "fd00:96::10", service.UDP, 0)
	tests := []struct {
		name string
		kind uint16
		body []byte
		want *Refusal // nil if it is none
	}{
		{"TCP over IPv4", logPacket, refusalMessage(tcp4), refused(service.TCP, "10.1.0.2:4000", "10.96.0.10:80")},
		{"IPv4 with options", logPacket, refusalMessage(options), refused(service.TCP, "10.1.0.2:4000", "10.96.0.10:80")},
		{"UDP over IPv6", logPacket, refusalMessage(udp6), refused(service.UDP, "[fd01::2]:4000", "[fd00:96::10]:80")},
		{"IPv4, cut short within the ports", logPacket, refusalMessage(tcp4[:len(tcp4)-1]), nil},
		{"IPv4, cut short within the options", logPacket, refusalMessage(options[:40]), nil},
		{"IPv6, cut short within the ports", logPacket, refusalMessage(udp6[:len(udp6)-1]), nil},
		{"a protocol without ports", logPacket, refusalMessage(icmp), nil},
		{"neither IPv4 nor IPv6", logPacket, refusalMessage(make([]byte, 64)), nil},
		{"no packet", logPacket, netlink.AppendNetfilter(nil, 0), nil},
		{"no header of netfilter's", logPacket, nil, nil},
		{"another message", logConfig, refusalMessage(tcp4), nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := refusalOf(&netlink.Message{Type: tt.kind, Body: tt.body})
			if ok != (tt.want != nil) || ok && got != *tt.want {
				t.Errorf("got %+v, %t; want %+v", got, ok, tt.want)
			}
		})
	}
}

// FuzzRefusalOf: nothing that may be logged makes it panic, and what it takes are two addresses of one family.
func FuzzRefusalOf(f *testing.F) {
	f.Add(refusalMessage(refusedPacket("10.1.0.2", "10.96.0.10", service.TCP, 40)))
	f.Add(refusalMessage(refusedPacket("fd01::2", "fd00:96::10", service.UDP, 0)))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, ok := refusalOf(&netlink.Message{Type: logPacket, Body: body})
		if ok && (!r.Client.IsValid() || r.Client.Addr().BitLen() != r.Address.Addr().BitLen()) {
			t.Errorf("%x is read as %+v", body, r)
		}
	})
}
