package flows

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestUnansweredDatagrams: an endpoint whose flows have no answer is suspected if others of its service answer.
func TestUnansweredDatagrams(t *testing.T) {
	e := func(n byte) netip.AddrPort { return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, n}), 53) }
	client := func(n int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, 2}), uint16(1000+n))
	}
	port := func(n byte) *plan.Service {
		s := &plan.Service{Port: &service.Port{Key: service.Key{Name: "dns", Protocol: service.UDP}}}
		for i := byte(1); i <= n; i++ {
			s.Endpoints = append(s.Endpoints, plan.Endpoint{Endpoint: &service.Endpoint{Address: e(i)}})
		}
		return s
	}
	p := &plan.Plan{Services: []*plan.Service{port(2)}}
	now := time.Now()
	for name, c := range map[string]struct {
		answered   []byte // endpoints of flows
		unanswered []byte
		packets    uint64
		want       []netip.AddrPort
	}{
		"three flows":                   {[]byte{2}, []byte{1, 1, 1}, 1, []netip.AddrPort{e(1)}},
		"two flows":                     {[]byte{2}, []byte{1, 1}, 1, nil},
		"one that was sent again":       {[]byte{2}, []byte{1}, 2, []netip.AddrPort{e(1)}},
		"no endpoint answers":           {nil, []byte{1, 1, 1, 2, 2, 2}, 3, nil},
		"an answer after the silence":   {[]byte{2, 1}, nil, 1, nil},
		"endpoints of no UDP service's": {[]byte{2}, []byte{9, 9, 9}, 3, nil},
	} {
		var d Datagrams
		var begun []begunFlow
		var silent []conntrack.Flow
		for _, to := range append(slices.Clone(c.unanswered), c.answered...) {
			b := begunFlow{client(len(begun)), e(to), now}
			begun = append(begun, b)
			if len(begun) <= len(c.unanswered) {
				silent = append(silent, conntrack.Flow{Protocol: service.UDP, OrigSrc: b.client, ReplySrc: b.endpoint, OrigPackets: c.packets})
			}
		}
		d.look(begun, silent, now)
		if diff := cmp.Diff(c.want, d.suspects(p, now), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("%s: suspects (-want +got):\n%s", name, diff)
		}
		again := now.Add(datagramWindow / 2) // what was sent again is forgotten before a later flow
		d.look([]begunFlow{{client(99), e(1), again}}, []conntrack.Flow{{Protocol: service.UDP, OrigSrc: client(99), ReplySrc: e(1), OrigPackets: 1}}, again)
		d.look([]begunFlow{{client(98), e(2), again}}, nil, now.Add(datagramWindow+time.Second))
		if got := d.suspects(p, now.Add(datagramWindow+time.Second)); len(got) > 0 {
			t.Errorf("%s: one flow, sent once, suspects %v", name, got)
		}
		d.look(nil, nil, now.Add(3*datagramWindow))
		if len(d.seen) > 0 {
			t.Errorf("%s: a while later it still remembers %v", name, d.seen)
		}
	}
}

// TestDeparted: endpoints that are gone, or neither ready nor serving any more, are told to the detector, and no others.
func TestDeparted(t *testing.T) {
	at := func(n byte) netip.AddrPort { return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, n}), 80) }
	of := func(p service.Protocol, list ...service.Endpoint) *plan.Service {
		s := &plan.Service{Port: &service.Port{Key: service.Key{Name: "web", Protocol: p}}}
		for i := range list {
			s.Endpoints = append(s.Endpoints, plan.Endpoint{Endpoint: &list[i]})
		}
		return s
	}
	alone := func(s *plan.Service) *plan.Service { s.Port.Health.Kind = service.CheckOff; return s }
	was := []service.Endpoint{{Address: at(1), Ready: true}, {Address: at(2), Ready: true}, {Address: at(3), Ready: true}, {Address: at(4)}}
	is := []service.Endpoint{{Address: at(1), Ready: true}, {Address: at(2), Serving: true, Terminating: true}, {Address: at(4)}}
	for name, c := range map[string]struct {
		d    plan.Delta
		want []netip.AddrPort
	}{
		"one is gone":         {plan.Delta{Changes: []plan.Change{{Was: of(service.TCP, was...), Is: of(service.TCP, is...)}}}, []netip.AddrPort{at(3)}},
		"the service is gone": {plan.Delta{Changes: []plan.Change{{Was: of(service.TCP, was...)}}}, []netip.AddrPort{at(1), at(2), at(3)}},
		"left alone":          {plan.Delta{Changes: []plan.Change{{Was: alone(of(service.TCP, was...))}}}, nil},
		"UDP":                 {plan.Delta{Changes: []plan.Change{{Was: of(service.UDP, was...)}}}, nil},
		"a new service":       {plan.Delta{Changes: []plan.Change{{Is: of(service.TCP, is...)}}}, nil},
	} {
		var got []netip.AddrPort
		for _, e := range Departed(c.d) {
			got = append(got, e.Address)
		}
		if diff := cmp.Diff(c.want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
