package kernel_test

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestRawPackets looks at what another host gets: a wrong checksum would keep it from there.
func TestRawPackets(t *testing.T) {
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			n := kerneltest.NewNetwork(t, 1)
			client := netip.AddrPortFrom(n.Address(f, 1), 40000)
			at := netip.AddrPortFrom(n.NodeAddress(f, 1), 53)
			elsewhere := netip.MustParseAddrPort([2]string{service.IPv4: "10.96.0.1:80", service.IPv6: "[fd00:96::1]:80"}[f])
			icmp, most, inner := [2]string{"ip4:icmp", "ip6:ipv6-icmp"}[f], [2]int{556, 1240}[f], [2]int{20, 40}[f]
			receive := func(network string, is func([]byte) bool, send func() error) (packet []byte, from netip.Addr) {
				t.Helper()
				var c *net.IPConn
				var err error
				n.On(1, func() { c, err = net.ListenIP(network, nil) })
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if err := send(); err != nil {
					t.Fatal(err)
				}
				_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
				b := make([]byte, 2000)
				for {
					size, peer, err := c.ReadFromIP(b)
					if err != nil {
						t.Fatal(err)
					}
					if is(b[:size]) {
						from, _ = netip.AddrFromSlice(peer.IP)
						return b[:size], from.Unmap()
					}
				}
			}
			for _, size := range []int{0, 11, 3000} {
				datagram := bytes.Repeat([]byte{7}, size)
				got, from := receive(icmp, func(b []byte) bool { return b[0] == [2]byte{11, 3}[f] },
					func() error { return kernel.TimeExceeded(client, at, datagram) })
				if from != at.Addr() || len(got) != min(8+inner+8+size, most) || got[1] != 0 {
					t.Errorf("%d bytes: message of %d bytes from %s: % x", size, len(got), from, got)
				}
				quoted := got[8:]
				src, _ := netip.AddrFromSlice(quoted[inner-2*len(client.Addr().AsSlice()):][:len(client.Addr().AsSlice())])
				udp := quoted[inner:]
				if src != client.Addr() || binary.BigEndian.Uint16(udp) != client.Port() || binary.BigEndian.Uint16(udp[2:]) != at.Port() || binary.BigEndian.Uint16(udp[4:]) != uint16(8+size) {
					t.Errorf("%d bytes: quotes % x", size, quoted)
				}
			}
			got, from := receive([2]string{"ip4:tcp", "ip6:tcp"}[f], func(b []byte) bool { return len(b) == 20 && b[13] == 0x12 },
				func() error { return kernel.Challenge(elsewhere, client) })
			if from != elsewhere.Addr() || binary.BigEndian.Uint16(got) != elsewhere.Port() || binary.BigEndian.Uint16(got[2:]) != client.Port() {
				t.Errorf("SYN with ACK from %s: % x", from, got)
			}
		})
	}
}
