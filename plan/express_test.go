package plan

import (
	"testing"

	"kproxy.dev/kproxy/service"
)

// TestExpressComplete: every algorithm has an answer in every data plane.
func TestExpressComplete(t *testing.T) {
	var in Inputs
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
			if got := Inexpressible(d, &p, &in); got != answers[a] {
				t.Errorf("%s, %s: %q, want %q", d, a, got, answers[a])
			}
			if got := degraded(shortfalls(d, &p, &in)); (got == "") != (answers[a] == "") {
				t.Errorf("%s, %s: degraded %q", d, a, got)
			}
		}
	}
}

func TestExpress(t *testing.T) {
	proxyProtocol := func(p *service.Port) { p.ProxyProtocol = 1 }
	leastConnections := func(p *service.Port) { p.Algorithm = service.LeastConnections }
	sctp := func(p *service.Port) { p.Protocol = service.SCTP }
	var in Inputs
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
		{"nothing beneath", None, port("a", leastConnections), "nothing is carried", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.port.Algorithm == "" {
				tt.port.Algorithm = service.RoundRobin
			}
			why := Inexpressible(tt.plane, &tt.port, &in)
			lacks := degraded(shortfalls(tt.plane, &tt.port, &in))
			if why != tt.why || lacks != tt.degraded {
				t.Errorf("inexpressible %q, degraded %q, want %q, %q", why, lacks, tt.why, tt.degraded)
			}
		})
	}
}

func TestChooseKernel(t *testing.T) {
	has := func(iptables, ipvs bool) Caps {
		return Caps{IPTables: Capability{Supported: iptables, Reason: "no iptables"}, IPVS: Capability{Supported: ipvs}}
	}
	tests := []struct {
		mode  Mode
		caps  Caps
		plane DataPlane
		why   string
	}{
		{ModeUserspace, has(true, true), None, "mode userspace offloads nothing"},
		{ModeIPTables, has(true, true), IPTables, ""},
		{ModeIPTables, has(false, true), None, "this host can't do iptables: no iptables"},
		{ModeIPVS, has(true, true), IPVS, ""},
		{ModeIPVS, has(true, false), None, "this host can't do IPVS"},
		{ModeAuto, has(true, true), IPVS, ""},
		{ModeAuto, has(true, false), IPTables, ""},
		{ModeAuto, has(false, false), None, "this host can't do iptables: no iptables"},
	}
	for _, tt := range tests {
		got := chooseKernel(tt.mode, tt.caps)
		if got.plane != tt.plane || got.why != tt.why {
			t.Errorf("%s with %+v: %s (%s), want %s (%s)", tt.mode, tt.caps, got.plane, got.why, tt.plane, tt.why)
		}
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
	w.in.Failed[sctp.Key] = Failure{Since: t0, Reason: "no memory", Hash: w.in.Previous.Services[0].KernelHash}
	expect(IPTables, StateOffloaded, noMemory)
	w.in.Policy.Mode = ModeUserspace
	expect(None, StateRejecting, "SCTP can't be served in userspace; mode userspace offloads nothing")
	if f := w.in.Previous.Services[0].Frontends[0]; f.Verdict != Reject {
		t.Errorf("verdict %s in mode userspace, want reject", f.Verdict)
	}
}
