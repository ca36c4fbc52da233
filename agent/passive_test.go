package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/passive"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

func udpAt(a string) health.Endpoint {
	return health.Endpoint{Protocol: service.UDP, Address: netip.MustParseAddrPort(a)}
}

// TestEjectionsAreKept: another process begins with what is ejected, unless that is old or can't be read.
func TestEjectionsAreKept(t *testing.T) {
	p := passiveHealth{Detector: passive.New(passive.Config{Log: slog.New(slog.DiscardHandler), Changed: func([]health.Endpoint) {}}), file: filepath.Join(t.TempDir(), node.EjectionsFile)}
	if known, err := readEjections(p.file); err != nil || known != nil {
		t.Errorf("without a file: %v, %v", known, err)
	}
	want := map[health.Endpoint]*health.Ejection{
		udpAt("10.2.0.2:53"): {Since: time.Now().Round(0), Reason: health.Silent, Evidence: "unanswered datagrams of 3 clients", Probes: 4, Node: "n1"},
		{Protocol: service.TCP, Address: netip.MustParseAddrPort("[fd00::1]:80")}: {Since: time.Now().Round(0), Reason: health.Refused},
	}
	p.Restore(want)
	if err := p.write(); err != nil {
		t.Fatal(err)
	}
	got, err := readEjections(p.file)
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" || err != nil {
		t.Errorf("read (-want +got), %v:\n%s", err, diff)
	}
	old := time.Now().Add(-ejectionsAge - time.Second)
	if err := os.Chtimes(p.file, old, old); err != nil {
		t.Fatal(err)
	}
	if known, err := readEjections(p.file); err != nil || known != nil {
		t.Errorf("of an old file: %v, %v", known, err)
	}
	if err := os.WriteFile(p.file, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readEjections(p.file); err == nil || !strings.Contains(err.Error(), p.file) {
		t.Errorf("a broken file: %v", err)
	}
}

// silence answers no probe.
type silence struct{}

func (silence) Endpoint(ctx context.Context, _ health.Endpoint) passive.Answer {
	<-ctx.Done()
	return passive.Nothing
}

func (silence) Host(ctx context.Context, e health.Endpoint) passive.Answer {
	return silence{}.Endpoint(ctx, e)
}

// TestEjectionsStayKnown: the file of what stays ejected doesn't grow old.
func TestEjectionsStayKnown(t *testing.T) {
	file := filepath.Join(t.TempDir(), node.EjectionsFile)
	synctest.Test(t, func(t *testing.T) {
		log := slog.New(slog.DiscardHandler)
		p := passiveHealth{Detector: passive.New(passive.Config{Log: log, Prober: silence{}, Changed: func([]health.Endpoint) {}}), file: file, save: make(chan struct{}, 1)}
		p.Restore(map[health.Endpoint]*health.Ejection{udpAt("10.2.0.2:53"): {Since: time.Now(), Reason: health.Silent}})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.run(ctx, log, func() *plan.Plan { return nil }) }()
		time.Sleep(ejectionsAge / 2)
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	if known, err := readEjections(file); err != nil || len(known) != 1 {
		t.Errorf("the next one would know %v, %v", known, err)
	}
}

// TestEjectionsAreTakenOver: they are in force at once, for the services that have such endpoints, and aren't counted again.
func TestEjectionsAreTakenOver(t *testing.T) {
	dir, at := t.TempDir(), udpAt("10.2.0.2:53")
	if err := os.WriteFile(filepath.Join(dir, node.EjectionsFile), []byte(`[{"protocol":"udp","address":"10.2.0.2:53","reason":"silent"}]`), 0o644); err != nil {
		t.Fatal(err)
	}
	a := New(Options{Config: config.Config{PassiveHealth: true, StateDir: dir}, Log: slog.New(slog.DiscardHandler)})
	a.openPassive()
	port := func(name string, p service.Protocol) *plan.Service {
		s := &plan.Service{Port: &service.Port{Key: service.Key{Name: name, Protocol: p}}}
		s.Endpoints = []plan.Endpoint{{Endpoint: &service.Endpoint{Address: at.Address}}}
		return s
	}
	p := &plan.Plan{Services: []*plan.Service{port("dns", service.UDP), port("dns-tcp", service.TCP)}}
	if v := a.ejections(p); v.Len() != 1 || v.Of(at) == nil {
		t.Errorf("ejected: %v", v.All())
	}
	if !a.dirty[p.Services[0].Port.Key] || len(a.dirty) != 1 {
		t.Errorf("decided anew: %v", a.dirty)
	}
	if ejected, _ := a.passive.counts(); len(ejected) > 0 {
		t.Errorf("counted: %v", ejected)
	}
	clear(a.dirty)
	if a.ejections(p); len(a.dirty) > 0 {
		t.Errorf("nothing has changed, and %v are decided anew", a.dirty)
	}
}

// TestNodesAreAnnounced: once when they fall silent, and once when they are back.
func TestNodesAreAnnounced(t *testing.T) {
	a := &Agent{}
	r := &recorded{}
	a.record = r
	silent := func(nodes []health.SilentNode, i *health.Isolation) *health.Ejections {
		return health.NewEjections(nil, nodes, i)
	}
	n1, n1More := []health.SilentNode{{Name: "n1", Silent: 2, Asked: 2}}, []health.SilentNode{{Name: "n1", Silent: 3, Asked: 4}}
	cut := &health.Isolation{Silent: 3, Nodes: 4}
	for i, step := range []struct {
		was, now *health.Ejections
		want     string
	}{
		{nil, silent(nil, nil), ""},
		{nil, silent(n1, nil), "NodeSilent"},
		{silent(n1, nil), silent(n1More, nil), ""},
		{silent(n1, nil), silent(nil, cut), "NodeAnswers NodeIsolated"},
		{silent(nil, cut), silent(nil, nil), "NodeIsolated"},
	} {
		*r = nil
		a.announceNodes(step.was, step.now)
		var got []string
		for _, e := range *r {
			got = append(got, e[2])
		}
		if strings.Join(got, " ") != step.want {
			t.Errorf("step %d: %q, want %q", i, *r, step.want)
		}
	}
}

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
		var d datagrams
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

// TestHasEndpoint: an endpoint is served while a service has it that is ready or drains, also one that is to be left alone.
func TestHasEndpoint(t *testing.T) {
	a := &Agent{}
	at := func(n byte) health.Endpoint {
		return health.Endpoint{Protocol: service.TCP, Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, n}), 80)}
	}
	s := &plan.Service{Port: &service.Port{Key: service.Key{Name: "web", Protocol: service.TCP}, Health: service.HealthCheck{Kind: service.CheckOff}}}
	for _, e := range []service.Endpoint{{Address: at(1).Address, Ready: true}, {Address: at(2).Address, Serving: true}, {Address: at(3).Address}} {
		s.Endpoints = append(s.Endpoints, plan.Endpoint{Endpoint: &e})
	}
	a.current.Store(&plan.Plan{Services: []*plan.Service{s}})
	for e, want := range map[health.Endpoint]bool{at(1): true, at(2): true, at(3): false, at(4): false, {Protocol: service.UDP, Address: at(1).Address}: false} {
		if got := a.hasEndpoint(e); got != want {
			t.Errorf("%v: %v, want %v", e, got, want)
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
		for _, e := range departed(c.d) {
			got = append(got, e.Address)
		}
		if diff := cmp.Diff(c.want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
