package kernel_test

import (
	"errors"
	"net"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestRouteEvents: it is looked again after each kind of change, and after an error, and not without.
func TestRouteEvents(t *testing.T) {
	kerneltest.Namespace(t)
	var e kernel.RouteEvents
	defer e.Close()
	looked := func() (is bool) {
		t.Helper()
		if err := e.Look(func() error { is = true; return nil }); err != nil {
			t.Fatal(err)
		}
		return is
	}
	if !looked() || looked() {
		t.Error("want one look at first")
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	_, network, _ := net.ParseCIDR("192.0.2.0/24")
	_, network6, _ := net.ParseCIDR("fd00:1::/64")
	rule := func(family int) *netlink.Rule {
		r := netlink.NewRule()
		r.Family, r.Table, r.Priority = family, 100, 100
		return r
	}
	for _, x := range []struct {
		name   string
		change func() error
	}{
		{"link", func() error { return netlink.LinkSetMTU(lo, 1400) }},
		{"IPv4 address", func() error { return netlink.AddrAdd(lo, &netlink.Addr{IPNet: network}) }},
		{"IPv6 address", func() error { return netlink.AddrAdd(lo, &netlink.Addr{IPNet: network6}) }},
		{"IPv4 route", func() error {
			return netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: network, Table: 100})
		}},
		{"IPv6 route", func() error {
			return netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: network6, Table: 100})
		}},
		{"IPv4 rule", func() error { return netlink.RuleAdd(rule(netlink.FAMILY_V4)) }},
		{"IPv6 rule", func() error { return netlink.RuleAdd(rule(netlink.FAMILY_V6)) }},
		{"no IPv4 rule", func() error { return netlink.RuleDel(rule(netlink.FAMILY_V4)) }},
		{"IPv4 forwarding", func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }},
		{"IPv6 forwarding", func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0) }},
		{"no IPv6", func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/lo/disable_ipv6", []byte("1"), 0) }},
	} {
		if err := x.change(); err != nil {
			t.Fatalf("%s: %v", x.name, err)
		}
		if !looked() {
			t.Errorf("%s: overlooked", x.name)
		}
		for range 100 { // IPv6 tells of some things a moment later
			if !looked() {
				break
			}
		}
	}
	failed := errors.New("failed")
	if err := netlink.LinkSetDown(lo); err != nil {
		t.Fatal(err)
	}
	if err := e.Look(func() error { return failed }); err != failed {
		t.Errorf("Look returns %v", err)
	}
	if !looked() {
		t.Error("no look after one that failed")
	}
}
