package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/config"
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
