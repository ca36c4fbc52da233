package ipvs_test

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// change does something to a virtual server, or to one of its real servers.
func change(t ipvs.Table, do ipvs.Verb, v kernel.Virtual, r ...kernel.Real) error {
	request := ipvs.Request{Do: do, Virtual: v}
	if len(r) > 0 {
		request.Real = r[0]
	}
	return t.Change(request)[0]
}

// changed joins the errors of a change of addresses that must not fail for single ones.
func changed(failed map[netip.Addr]error, err error) error {
	return errors.Join(err, errors.Join(slices.Collect(maps.Values(failed))...))
}

// foreignReal is a foreign real server for a virtual server of either family.
func foreignReal(v kernel.Virtual) kernel.Real {
	a := "203.0.113.99:9"
	if service.FamilyOf(v.Address.Addr()) == service.IPv6 {
		a = "[2001:db8:99::9]:9"
	}
	return kernel.Real{Address: netip.MustParseAddrPort(a), Weight: 3}
}

// TestTable holds the model to what the kernel does: what it takes, what it
// refuses, and with which error.
func TestTable(t *testing.T) {
	v4 := kernel.Virtual{Protocol: service.TCP, Address: netip.MustParseAddrPort("10.96.0.1:80"), Scheduler: "rr"}
	v6 := kernel.Virtual{Protocol: service.SCTP, Address: netip.MustParseAddrPort("[fd00:96::1]:80"), Scheduler: "sh", SchedFlags: 8, Persistence: 300}
	udp, absent, sticky := v4, v4, v4
	udp.Protocol, absent.Scheduler, sticky.Scheduler, sticky.Persistence = service.UDP, "absent", "wlc", 60
	r4 := kernel.Real{Address: netip.MustParseAddrPort("10.2.0.2:8080"), Weight: 3}
	r6 := kernel.Real{Address: netip.MustParseAddrPort("[fd00:2::2]:8080")}
	virtual := func(do ipvs.Verb, v kernel.Virtual) func(ipvs.Table) error {
		return func(t ipvs.Table) error { return change(t, do, v) }
	}
	real := func(do ipvs.Verb, v kernel.Virtual, r kernel.Real) func(ipvs.Table) error {
		return func(t ipvs.Table) error { return change(t, do, v, r) }
	}
	steps := []struct {
		name string
		do   func(ipvs.Table) error
		want error
	}{
		{"edit a virtual server that isn't there", virtual(ipvs.Edit, v4), kernel.ErrNotFound},
		{"delete it", virtual(ipvs.Delete, v4), kernel.ErrNotFound},
		{"add a real server to it", real(ipvs.Add, v4, r4), kernel.ErrNotFound},
		{"add it, with a scheduler that isn't there", virtual(ipvs.Add, absent), ipvs.ErrScheduler},
		{"add it", virtual(ipvs.Add, v4), nil},
		{"add it again", virtual(ipvs.Add, sticky), ipvs.ErrExists},
		{"add that of another protocol", virtual(ipvs.Add, udp), nil},
		{"add one of the other family", virtual(ipvs.Add, v6), nil},
		{"edit it, to a scheduler that isn't there", virtual(ipvs.Edit, absent), ipvs.ErrScheduler},
		{"edit a real server that isn't there", real(ipvs.Edit, v4, r4), kernel.ErrNotFound},
		{"delete it", real(ipvs.Delete, v4, r4), kernel.ErrNotFound},
		{"add it", real(ipvs.Add, v4, r4), nil},
		{"add it again", real(ipvs.Add, v4, r4), ipvs.ErrExists},
		{"add one to the other", real(ipvs.Add, v6, r6), nil},
		{"give it another weight", real(ipvs.Edit, v6, kernel.Real{Address: r6.Address, Weight: 7}), nil},
		{"edit the virtual server, which keeps it", virtual(ipvs.Edit, sticky), nil},
		{"delete a virtual server with a real server", virtual(ipvs.Delete, v6), nil},
		{"add it again, without", virtual(ipvs.Add, v6), nil},
	}
	sticky.Reals = []kernel.Real{r4}
	want := []ipvs.Server{{Virtual: sticky, Connections: []int{0}}, {Virtual: udp}, {Virtual: v6}}
	eachTable(t, func(t *testing.T, table ipvs.Table) {
		for _, s := range steps {
			if err := s.do(table); !errors.Is(err, s.want) {
				t.Errorf("%s: %v, want %v", s.name, err, s.want)
			}
		}
		got, err := table.List()
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" || err != nil {
			t.Errorf("List: %v (-want +got):\n%s", err, diff)
		}
		if got, err := table.List(udp, absent); err != nil || len(got) != 2 || got[1].Protocol != service.UDP {
			t.Errorf("List of two: %v, %v", got, err)
		}
	})
}

// eachTable runs a test with the model's table and with the kernel's.
func eachTable(t *testing.T, test func(*testing.T, ipvs.Table)) {
	t.Run("model", func(t *testing.T) { test(t, kerneltest.NewHost().Table()) })
	t.Run("kernel", func(t *testing.T) {
		kerneltest.Namespace(t)
		test(t, openTable(t))
	})
}

// TestManyRequests: of more requests than go to the kernel at once, each has its own
// error, and one that fails keeps none of the others from being carried out.
func TestManyRequests(t *testing.T) {
	real := kernel.Real{Address: netip.MustParseAddrPort("10.2.0.2:8080"), Weight: 3}
	var requests []ipvs.Request
	var want []error
	ask := func(r ipvs.Request, err error) { requests, want = append(requests, r), append(want, err) }
	var there []ipvs.Server
	for i, v := range manyVirtuals(400) {
		v.Owner, v.Reals = service.Key{}, nil
		if i%7 == 3 {
			ask(ipvs.Request{Do: ipvs.Add, Virtual: v, Real: real}, kernel.ErrNotFound)
		}
		ask(ipvs.Request{Do: ipvs.Add, Virtual: v}, nil)
		if i%5 == 2 {
			ask(ipvs.Request{Do: ipvs.Add, Virtual: v}, ipvs.ErrExists)
		}
		ask(ipvs.Request{Do: ipvs.Add, Virtual: v, Real: real}, nil)
		if i%11 == 0 {
			ask(ipvs.Request{Do: ipvs.Delete, Virtual: v}, nil)
			ask(ipvs.Request{Do: ipvs.Delete, Virtual: v, Real: real}, kernel.ErrNotFound)
			continue
		}
		v.Reals = []kernel.Real{real}
		there = append(there, ipvs.Server{Virtual: v, Connections: []int{0}})
	}
	eachTable(t, func(t *testing.T, table ipvs.Table) {
		for i, err := range table.Change(requests...) {
			if !errors.Is(err, want[i]) {
				t.Errorf("request %d, %s %s %s: %v, want %v", i, requests[i].Do, requests[i].Virtual.Address, requests[i].Real.Address, err, want[i])
			}
		}
		got, err := table.List()
		if diff := cmp.Diff(there, got, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" || err != nil {
			t.Errorf("List: %v (-want +got):\n%s", err, diff)
		}
		if errs := table.Change(); len(errs) > 0 {
			t.Errorf("nothing asked for: %v", errs)
		}
	})
}

// TestLink holds the model's link to what the kernel's does.
func TestLink(t *testing.T) {
	a, b := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:96::1")
	links := map[string]func(t *testing.T) ipvs.Link{
		"model": func(*testing.T) ipvs.Link { return kerneltest.NewHost().Link() },
		"kernel": func(t *testing.T) ipvs.Link {
			kerneltest.Namespace(t)
			openTable(t) // where there is IPVS, there are dummy links
			l, err := ipvs.OpenLink()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(l.Close)
			return l
		},
	}
	steps := []struct {
		name string
		do   func(ipvs.Link) error
		want error
		then ipvs.LinkState
	}{
		{"remove a link that isn't there", ipvs.Link.Remove, nil, ipvs.LinkState{}},
		{"add an address", func(l ipvs.Link) error { return changed(l.Add(a)) }, kernel.ErrNotFound, ipvs.LinkState{}},
		{"make it", ipvs.Link.Ensure, nil, ipvs.LinkState{Exists: true, Up: true}},
		{"make it again", ipvs.Link.Ensure, nil, ipvs.LinkState{Exists: true, Up: true}},
		{"add addresses", func(l ipvs.Link) error { return changed(l.Add(b, a)) }, nil, ipvs.LinkState{Exists: true, Up: true, Addresses: []netip.Addr{a, b}}},
		{"add one again", func(l ipvs.Link) error { return changed(l.Add(a)) }, nil, ipvs.LinkState{Exists: true, Up: true, Addresses: []netip.Addr{a, b}}},
		{"delete one", func(l ipvs.Link) error { return changed(l.Delete(a)) }, nil, ipvs.LinkState{Exists: true, Up: true, Addresses: []netip.Addr{b}}},
		{"delete it again", func(l ipvs.Link) error { return changed(l.Delete(a)) }, nil, ipvs.LinkState{Exists: true, Up: true, Addresses: []netip.Addr{b}}},
		{"remove the link", ipvs.Link.Remove, nil, ipvs.LinkState{}},
	}
	for name, open := range links {
		t.Run(name, func(t *testing.T) {
			l := open(t)
			for _, s := range steps {
				if err := s.do(l); !errors.Is(err, s.want) {
					t.Errorf("%s: %v, want %v", s.name, err, s.want)
				}
				got, err := l.State()
				if diff := cmp.Diff(s.then, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" || err != nil {
					t.Errorf("after %s: %v (-want +got):\n%s", s.name, err, diff)
				}
			}
		})
	}
}
