package plan

import (
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

func algorithm(a service.Algorithm) func(*service.Port) {
	return func(p *service.Port) { p.Algorithm, p.AlgorithmGiven = a, true }
}

func scheduler(name string) func(*service.Port) {
	return func(p *service.Port) { p.Scheduler = name }
}

// inexpressible says why d can't carry p as specified; empty if it can.
func inexpressible(d DataPlane, p *service.Port, in *Inputs) string {
	if d == Userspace && p.Protocol == service.SCTP {
		return "SCTP can't be served in userspace"
	}
	return keptBack(fallsShort(d, p, in))
}

// fallsShort is how d falls short of p's specification.
func fallsShort(d DataPlane, p *service.Port, in *Inputs) []shortfall {
	c, a := newComputation(nil, *in), in.Caps.Plane(d)
	return c.shortfalls(&a, p)
}

// TestExpressComplete: every algorithm has an answer in every data plane.
func TestExpressComplete(t *testing.T) {
	in := Inputs{Caps: allCaps}
	want := map[DataPlane]map[service.Algorithm]string{
		Userspace: {
			service.RoundRobin: "", service.WeightedRoundRobin: "", service.LeastConnections: "",
			service.Random: "", service.SourceHash: "", service.Maglev: "",
		},
		IPTables: {
			service.RoundRobin: "", service.WeightedRoundRobin: "", service.Random: "",
			service.LeastConnections: "iptables can't do least connections",
			service.SourceHash:       "iptables can't do source hash",
			service.Maglev:           "iptables can't do maglev",
		},
		IPVS: {
			service.RoundRobin: "", service.WeightedRoundRobin: "", service.LeastConnections: "",
			service.SourceHash: "", service.Maglev: "",
			service.Random: "ipvs can't do random",
		},
	}
	for d, answers := range want {
		if len(answers) != len(service.Algorithms) {
			t.Errorf("%s: the table has %d algorithms, there are %d", d, len(answers), len(service.Algorithms))
		}
		for _, a := range service.Algorithms {
			p := port("a", func(p *service.Port) { p.Algorithm = a })
			if got := inexpressible(d, &p, &in); got != answers[a] {
				t.Errorf("%s, %s: %q, want %q", d, a, got, answers[a])
			}
			if got := degraded(fallsShort(d, &p, &in)); (got == "") != (answers[a] == "") {
				t.Errorf("%s, %s: degraded %q", d, a, got)
			}
		}
	}
}

func TestExpress(t *testing.T) {
	proxyProtocol := func(p *service.Port) { p.ProxyProtocol = 1 }
	leastConnections := algorithm(service.LeastConnections)
	sctp := func(p *service.Port) { p.Protocol = service.SCTP }
	in := Inputs{Caps: capsOf(Capability{}, Capability{}, map[string]string{"mh": "no module ip_vs_mh", "sh": ""})}
	tests := []struct {
		name          string
		plane         DataPlane
		port          service.Port
		why, degraded string
	}{
		{"PROXY protocol in userspace", Userspace, port("a", proxyProtocol), "", ""},
		{"PROXY protocol under iptables", IPTables, port("a", proxyProtocol), "iptables can't send PROXY protocol headers", "endpoints get no PROXY protocol header while kproxy is down"},
		{"least connections", IPTables, port("a", leastConnections), "iptables can't do least connections", "least connections falls back to random choice while kproxy is down"},
		{"both", IPTables, port("a", leastConnections, proxyProtocol), "iptables can't do least connections", "least connections falls back to random choice while kproxy is down; endpoints get no PROXY protocol header while kproxy is down"},
		{"SCTP in userspace", Userspace, port("a", sctp), "SCTP can't be served in userspace", ""},
		{"SCTP under iptables", IPTables, port("a", sctp), "", ""},
		{"SCTP with least connections", IPTables, port("a", sctp, leastConnections), "iptables can't do least connections", "least connections falls back to random choice"},
		{"affinity", IPTables, port("a", func(p *service.Port) { p.Affinity = 1 }), "", ""},
		{"a scheduler under iptables", IPTables, port("a", scheduler("sed")), "iptables has no IPVS scheduler sed", "scheduler sed falls back to round robin while kproxy is down"},
		{"a scheduler and maglev under iptables", IPTables, port("a", scheduler("sed"), algorithm(service.Maglev)), "iptables has no IPVS scheduler sed", "scheduler sed falls back to random choice while kproxy is down"},
		{"PROXY protocol under IPVS", IPVS, port("a", proxyProtocol), "ipvs can't send PROXY protocol headers", "endpoints get no PROXY protocol header while kproxy is down"},
		{"random", IPVS, port("a", algorithm(service.Random)), "ipvs can't do random", "random falls back to scheduler rr while kproxy is down"},
		{"random with PROXY protocol", IPVS, port("a", algorithm(service.Random), proxyProtocol), "ipvs can't do random", "random falls back to scheduler rr while kproxy is down; endpoints get no PROXY protocol header while kproxy is down"},
		{"random over SCTP", IPVS, port("a", sctp, algorithm(service.Random)), "ipvs can't do random", "random falls back to scheduler rr"},
		{"random, but a scheduler", IPVS, port("a", algorithm(service.Random), scheduler("sed")), "", ""},
		{"an algorithm whose module is missing", IPVS, port("a", algorithm(service.Maglev)), "ipvs has no scheduler mh here: no module ip_vs_mh", "maglev falls back to scheduler rr while kproxy is down"},
		{"a scheduler that is missing", IPVS, port("a", scheduler("mh")), "ipvs has no scheduler mh here: no module ip_vs_mh", "scheduler mh falls back to scheduler rr while kproxy is down"},
		{"a scheduler instead of the missing one", IPVS, port("a", algorithm(service.Maglev), scheduler("sh")), "", ""},
		{"affinity under IPVS", IPVS, port("a", func(p *service.Port) { p.Affinity = time.Hour }), "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.port.Algorithm == "" {
				tt.port.Algorithm = service.RoundRobin
			}
			why := inexpressible(tt.plane, &tt.port, &in)
			lacks := degraded(fallsShort(tt.plane, &tt.port, &in))
			if why != tt.why || lacks != tt.degraded {
				t.Errorf("inexpressible %q, degraded %q, want %q, %q", why, lacks, tt.why, tt.degraded)
			}
		})
	}
}

// TestSCTP: the kernel serves it or nobody.
func TestSCTP(t *testing.T) {
	sctp := port("a", func(p *service.Port) { p.Protocol = service.SCTP; p.Prefer = service.PreferUserspace })
	w := newWorld(t)
	w.set(sctp, "10.0.0.1 n1 ready")
	expect := func(plane DataPlane, state State, reason string) {
		t.Helper()
		if s := w.one(); s.DataPlane != plane || s.State != state || s.Reason != reason {
			t.Errorf("%s, %s (%s), want %s, %s (%s)", s.DataPlane, s.State, s.Reason, plane, state, reason)
		}
	}
	expect(IPTables, StateOffloaded, reasonUpdating)
	w.program()
	expect(IPTables, StateOffloaded, reasonKernelOnly)
	w.in.Failed[sctp.Key] = Failure{Since: t0, Reason: "no memory", Hash: w.previous.Services[0].KernelHash}
	expect(IPTables, StateOffloaded, noMemory)
	w.in.Policy.Mode = ModeUserspace
	expect(None, StateRejecting, "SCTP can't be served in userspace; mode userspace offloads nothing")
	if f := w.previous.Services[0].Frontends[0]; f.Verdict != Reject {
		t.Errorf("verdict %s in mode userspace, want reject", f.Verdict)
	}
}
