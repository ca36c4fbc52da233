package kernel_test

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/test/kerneltest"
)

func TestNodeAddresses(t *testing.T) {
	kerneltest.Namespace(t)
	check := func(what string, want ...string) {
		t.Helper()
		var addresses []netip.Addr
		for _, a := range want {
			addresses = append(addresses, netip.MustParseAddr(a))
		}
		networks, err := kernel.ReadNetworks()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(addresses, networks.Addresses, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check("a namespace with loopback only")
	// A pair of links stands in for any; the name decides which one is kproxy's.
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "one"}, PeerName: kernel.DummyLink}))
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "two"}, PeerName: "peer"}))
	for _, x := range []struct{ link, address string }{
		{"lo", "192.0.2.99/32"}, {kernel.DummyLink, "10.96.0.10/32"}, {"one", "fd00::7/64"}, {"one", "fe80::7/64"},
		{"one", "192.0.2.7/24"}, {"one", "192.0.2.8/24"}, {"two", "10.0.0.1/8"}, {"two", "192.0.2.7/32"},
	} {
		l, err := netlink.LinkByName(x.link)
		must(err)
		a, err := netlink.ParseAddr(x.address)
		must(err)
		must(netlink.AddrAdd(l, a))
	}
	check("links that are down, but loopback", "192.0.2.99")
	for _, name := range []string{"one", kernel.DummyLink, "peer"} {
		l, err := netlink.LinkByName(name)
		must(err)
		must(netlink.LinkSetUp(l))
	}
	check("one link up", "192.0.2.7", "192.0.2.8", "192.0.2.99", "fd00::7")
	two, err := netlink.LinkByName("two")
	must(err)
	must(netlink.LinkSetUp(two))
	check("both up", "10.0.0.1", "192.0.2.7", "192.0.2.8", "192.0.2.99", "fd00::7")
}
