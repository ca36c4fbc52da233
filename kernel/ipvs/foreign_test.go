package ipvs_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestForeignIsLeftAlone: a virtual server that isn't kproxy's at an address that
// a service wants, another one, a real server in one of kproxy's, a set, and a
// link stay as they are, whatever comes, clean-up included.
func TestForeignIsLeftAlone(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	h := newHost(t)
	taken := virtual(service.TCP, "10.96.0.10:80", "192.0.2.1:80", "192.0.2.2:80=0")
	other := virtual(service.UDP, "[fd00:96::a]:53", "[2001:db8::1]:53")
	for _, v := range []kernel.Virtual{taken, other} {
		h.must(change(h.table, ipvs.Add, v))
		for _, r := range v.Reals {
			h.must(change(h.table, ipvs.Add, v, r))
		}
	}
	run(t, "ipset create FOREIGN hash:ip; ipset add FOREIGN 192.0.2.9; ip link add foreign0 type dummy; ip addr add 192.0.2.9/32 dev foreign0")
	foreign := func() string {
		all, err := h.table.List(taken, other)
		h.must(err)
		text := run(t, "ipset save FOREIGN; ip -o addr show dev foreign0")
		for _, s := range all {
			for _, r := range s.Reals {
				text += r.Address.String() + " "
			}
		}
		return text
	}
	before := foreign()
	web := virtual(service.TCP, "10.96.0.10:80", "10.2.0.2:8080")
	dns := virtual(service.UDP, "10.96.0.11:53", "10.2.0.2:53")
	for range 2 {
		failed := h.bring(ruleset(web, dns))
		if len(failed) != 1 || failed[web.Owner] == nil || !strings.Contains(failed[web.Owner].Error(), "ipvsadm -D -t 10.96.0.10:80") {
			t.Errorf("failed: %v", failed)
		}
		h.expect("foreign", before, foreign())
		h.expect("addresses: none where a foreigner answers", "10.96.0.11", h.addresses())
		h.restart()
	}
	foreignReal := kernel.Real{Address: netip.MustParseAddrPort("192.0.2.77:9"), Weight: 5}
	h.must(change(h.table, ipvs.Add, dns, foreignReal))
	with := func() bool { return strings.Contains(h.servers(), " 192.0.2.77:9=5;") }
	for _, want := range []kernel.Ruleset{ruleset(dns), ruleset(virtual(service.UDP, "10.96.0.11:53", "10.2.0.3:53")), {}, ruleset(dns)} {
		h.bring(want)
		if left := h.drain(); left > 0 {
			t.Errorf("%d are said to drain beside a foreign real server, without an end", left)
		}
		if !with() {
			t.Errorf("the foreign real server is gone: %s", h.servers())
		}
		h.expect("foreign", before, foreign())
		h.restart()
	}
	cleaned := false
	h.must(ipvs.Cleanup(context.Background(), h.sets, func(context.Context) error {
		cleaned = true
		sets, err := kernel.ReadSets(h.sets)
		h.must(err)
		_, err = kernel.ApplySets(context.Background(), h.sets, kernel.DiffSets(sets, nil))
		return err
	}))
	h.expect("foreign after clean-up", before, foreign())
	h.expect("addresses after clean-up", "no link", h.addresses())
	h.expect("table after clean-up",
		"tcp 10.96.0.10:80 192.0.2.1:80=1 192.0.2.2:80=0; udp 10.96.0.11:53 192.0.2.77:9=5; udp [fd00:96::a]:53 [2001:db8::1]:53=1", h.servers())
	if !cleaned {
		t.Error("the rules weren't cleaned up")
	}
}

// TestForeignLink: another kind of link has the name that kproxy's has.
func TestForeignLink(t *testing.T) {
	kerneltest.Namespace(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: kernel.DummyLink}, PeerName: "kproxy-probe"}))
	l, err := ipvs.OpenLink()
	must(err)
	defer l.Close()
	_, err = l.State()
	for what, err := range map[string]error{"State": err, "Ensure": l.Ensure(), "Add": changed(l.Add(netip.MustParseAddr("10.96.0.1"))), "Remove": l.Remove()} {
		if !errors.Is(err, ipvs.ErrForeignLink) || !strings.Contains(err.Error(), "veth") {
			t.Errorf("%s = %v", what, err)
		}
	}
	sets, err := kernel.OpenIPSets()
	must(err)
	defer sets.Close()
	must(ipvs.Cleanup(context.Background(), sets, func(context.Context) error { return nil }))
	for _, name := range []string{kernel.DummyLink, "kproxy-probe"} {
		if _, err := netlink.LinkByName(name); err != nil {
			t.Errorf("after clean-up: %s: %v", name, err)
		}
	}
}

// TestRecordIsMended: what this process made stays kproxy's when somebody empties
// the record; and what is on the link's addresses when nobody remembers.
func TestRecordIsMended(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	h := newHost(t)
	run(t, "ip link add eth0 type dummy; ip link set eth0 up; ip addr add 192.0.2.9/32 dev eth0")
	web, port := virtual(service.TCP, "10.96.0.10:80", "10.2.0.2:8080"), virtual(service.TCP, "192.0.2.9:30080", "10.2.0.2:8080")
	want := ruleset(web, port)
	want.Addresses = want.Addresses[:1] // the other one is the node's own
	h.bring(want)
	flush := "for s in VIRTUAL-4 VIP-4 DRAIN-4 ENDPOINT-4; do ipset flush KPROXY-$s; done"
	run(t, flush)
	h.bring(want)
	const virtuals = "10.96.0.10,tcp:80 192.0.2.9,tcp:30080"
	h.expect("record of virtual servers", virtuals, h.entries("KPROXY-VIRTUAL-4"))
	h.expect("record of addresses", "10.96.0.10", h.entries("KPROXY-VIP-4"))

	h.restart()
	h.bring(want)
	run(t, flush)
	h.restart()
	failed := h.bring(want)
	if len(failed) != 1 || failed[port.Owner] == nil {
		t.Errorf("failed after a flush and a restart: %v", failed)
	}
	h.expect("record of virtual servers after a flush and a restart", "10.96.0.10,tcp:80", h.entries("KPROXY-VIRTUAL-4"))

	// Entries of what isn't there say nothing.
	h.must(h.sets.Add(ipvs.Sets()[4], 0, "10.96.0.99,tcp:80"))
	h.must(h.sets.Add(ipvs.Sets()[2], 0, "10.96.0.99"))
	h.restart()
	h.bring(want)
	h.expect("record without what isn't there", "10.96.0.10,tcp:80", h.entries("KPROXY-VIRTUAL-4"))
	h.expect("record without addresses that aren't there", "10.96.0.10", h.entries("KPROXY-VIP-4"))
}

func TestWatch(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	h := newHost(t)
	h.now = time.Now() // stands still: a check that takes long puts none off
	web := virtual(service.TCP, "10.96.0.10:80", "10.2.0.2:8080", "10.3.0.2:8080")
	dns := virtual(service.UDP, "[fd00:96::a]:53", "[fd00:2::2]:53")
	want := ruleset(web, dns)
	watch := ipvs.NewWatch(h.Backend, quiet{})
	defer watch.Close()
	check := func() []string {
		t.Helper()
		found, err := watch.Check(context.Background())
		h.must(err)
		return found
	}
	if found := check(); len(found) > 0 {
		t.Errorf("before anything is expected: %v", found)
	}
	h.bring(want)
	watch.Expect(want)
	if found := check(); len(found) > 0 {
		t.Errorf("all is well, but %v", found)
	}
	healthy := h.servers()
	for _, damage := range []struct{ command, want string }{
		{"ipvsadm -D -t 10.96.0.10:80", "virtual server tcp 10.96.0.10:80 is gone"},
		{"ipvsadm -E -t 10.96.0.10:80 -s wrr", "virtual server tcp 10.96.0.10:80 was changed"},
		{"ipvsadm -E -t 10.96.0.10:80 -s rr -p 60", "virtual server tcp 10.96.0.10:80 was changed"},
		{"ipvsadm -d -u [fd00:96::a]:53 -r [fd00:2::2]:53", "real servers of udp [fd00:96::a]:53 were changed"},
		{"ipvsadm -e -t 10.96.0.10:80 -r 10.3.0.2:8080 -m -w 7", "real servers of tcp 10.96.0.10:80 were changed"},
		{"ipvsadm -C", "is gone"},
		{"ip link del kproxy0", "link kproxy0 is gone"},
		{"ip link set kproxy0 down", "link kproxy0 is down"},
		{"ip addr del 10.96.0.10/32 dev kproxy0", "address 10.96.0.10 of kproxy0 is gone"},
		{"ip addr del fd00:96::a/128 dev kproxy0", "address fd00:96::a of kproxy0 is gone"},
		{"ip addr add 192.0.2.1/32 dev kproxy0", "address 192.0.2.1 of kproxy0 isn't of a service"},
		{"ipset flush KPROXY-VIRTUAL-4", "set KPROXY-VIRTUAL-4 has 0 entries, not 1"},
		{"ipset flush KPROXY-VIP-6", "set KPROXY-VIP-6 has 0 entries, not 1"},
		{"ipset add KPROXY-VIP-4 192.0.2.1", "set KPROXY-VIP-4 has 2 entries, not 1"},
		{"ipset destroy KPROXY-DRAIN-4; ipset create KPROXY-DRAIN-4 hash:ip,port,ip timeout 604800; ipset del KPROXY-VIRTUAL-6 '[fd00:96::a],udp:53'", "set KPROXY-VIRTUAL-6 has 0 entries, not 1"},
	} {
		run(t, damage.command)
		found := check()
		if !slices.ContainsFunc(found, func(s string) bool { return strings.Contains(s, damage.want) }) {
			t.Errorf("after %s: %q, want %q", damage.command, found, damage.want)
		}
		if failed := h.bring(want); len(failed) > 0 {
			t.Errorf("repair after %s: %v", damage.command, failed)
		}
		if found := check(); len(found) > 0 {
			t.Errorf("while it isn't known what to expect: %v", found)
		}
		watch.Expect(want)
		if found := check(); len(found) > 0 {
			t.Errorf("after the repair of %s: %q", damage.command, found)
		}
		h.expect("table after the repair of "+damage.command, healthy, h.servers())
		h.expect("addresses after the repair of "+damage.command, "10.96.0.10 fd00:96::a", h.addresses())
	}
	// What drains, and what others have, is no damage.
	run(t, "ipvsadm -A -t 192.0.2.1:80; ipvsadm -a -t 10.96.0.10:80 -r 192.0.2.1:9 -m; ip link add eth0 type dummy; ip addr add 192.0.2.3/32 dev eth0")
	if found := check(); len(found) > 0 {
		t.Errorf("somebody else's: %v", found)
	}
}

// TestServiceAddressIsNoSource: connections that have nothing to do with services
// don't come from service addresses, also where the node has no better one.
func TestServiceAddressIsNoSource(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	h := newHost(t)
	run(t, "ip link add eth0 type dummy; ip link set eth0 up; ip route add 192.0.2.0/24 dev eth0; ip -6 route add 2001:db8::/64 dev eth0; "+
		"ip link add eth1 type dummy; ip link set eth1 up; ip addr add 203.0.113.1/24 dev eth1; ip addr add 2001:db8:1::1/64 dev eth1 nodad")
	h.bring(ruleset(virtual(service.TCP, "10.96.0.10:80", "10.2.0.2:8080"), virtual(service.TCP, "[2001:db8::a]:80", "[fd00:2::2]:8080")))
	for to, want := range map[string]string{"192.0.2.1:9": "203.0.113.1", "[2001:db8::1]:9": "2001:db8:1::1"} {
		c, err := net.Dial("udp", to)
		if err != nil {
			t.Fatal(err)
		}
		h.expect("source of a connection to "+to, want, c.LocalAddr().(*net.UDPAddr).IP.String())
		c.Close()
	}
}
