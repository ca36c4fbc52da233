package plan

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// eject makes endpoints, and no others, ejected.
func (w *world) eject(addresses ...string) {
	m := map[health.Endpoint]*health.Ejection{}
	for _, a := range addresses {
		m[health.Endpoint{Protocol: service.TCP, Address: endpoint(a).Address}] = &health.Ejection{Since: w.in.Now, Reason: health.Silent, Evidence: "unanswered SYNs of 1 client", Probes: 4}
	}
	w.in.Ejected = health.NewEjections(m, nil, nil)
}

func usable(s *Service) (out []string) {
	for _, e := range s.Endpoints {
		if e.Usable {
			out = append(out, e.Address.Addr().String())
		}
	}
	return out
}

// TestEjected: an ejected endpoint gets no connections, as one that is down, and all are used when none is left.
func TestEjected(t *testing.T) {
	w := newWorld(t)
	w.set(port("a"), "10.0.0.1 n1 ready", "10.0.0.2 n1 ready", "10.0.0.3 n2 ready")
	w.one()
	for _, step := range []struct {
		ejected []string
		want    []string
		events  []string
	}{
		{[]string{"10.0.0.1"}, []string{"10.0.0.2", "10.0.0.3"}, []string{"10.0.0.1:8080 is down: ejected: silent to 4 probes after unanswered SYNs of 1 client, 0s"}},
		{[]string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, nil},
		{nil, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, []string{"10.0.0.1:8080 is up: ejected no longer, after 10s"}},
	} {
		w.in.Now = w.in.Now.Add(10 * time.Second)
		w.eject(step.ejected...)
		s := w.one()
		if diff := cmp.Diff(step.want, usable(s)); diff != "" {
			t.Errorf("ejected %v: usable (-want +got):\n%s", step.ejected, diff)
		}
		events := w.delta.Events(w.in.Now)
		for _, want := range step.events {
			if !slices.ContainsFunc(events, func(e Event) bool { return e.Kind == "health" && e.Message == want }) {
				t.Errorf("ejected %v: events %v, want %q", step.ejected, events, want)
			}
		}
		if w.delta.Ejects() != (len(step.ejected) > 0) {
			t.Errorf("ejected %v: the delta says %v", step.ejected, w.delta.Ejects())
		}
	}
	if s := w.one(); s.Endpoints[0].Ejected != nil {
		t.Error("an ejection stays")
	}
}

// TestNotEjected: a service may ask to be left alone, and TCP's verdicts aren't UDP's.
func TestNotEjected(t *testing.T) {
	for name, change := range map[string]func(*service.Port){
		"health checks off": func(p *service.Port) { p.Health.Kind = service.CheckOff },
		"UDP":               func(p *service.Port) { p.Protocol = service.UDP },
	} {
		w := newWorld(t)
		w.set(port("a", change), "10.0.0.1 n1 ready", "10.0.0.2 n1 ready")
		w.eject("10.0.0.1")
		if got := usable(w.one()); len(got) != 2 {
			t.Errorf("%s: usable %v, want both", name, got)
		}
	}
}

// TestEjectedFlows: UDP flows don't stay with an endpoint that is ejected, unless all are.
func TestEjectedFlows(t *testing.T) {
	e := Endpoint{Endpoint: &service.Endpoint{Ready: true, Serving: true}, Probed: &Probed{Health: "unknown", Ejected: &health.Ejection{}}}
	if e.Keeps() || !e.Leaves() {
		t.Errorf("an ejected endpoint keeps its flows: %v; leaves: %v", e.Keeps(), e.Leaves())
	}
	if e.Usable = true; !e.Keeps() || e.Leaves() {
		t.Errorf("where all are ejected, one keeps its flows: %v; leaves: %v", e.Keeps(), e.Leaves())
	}
}
