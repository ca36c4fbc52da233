package plan

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

// bothCaps is a host that can do everything but the scheduler mh.
var bothCaps = capsOf(Capability{Name: "iptables", Supported: true}, Capability{Name: "ipvs", Supported: true}, map[string]string{"rr": "", "mh": "no module ip_vs_mh"})

// in sets the mode of a host that can do everything.
func in(m Mode) func(*world) {
	return func(w *world) { w.in.Policy.Mode, w.in.Caps = m, bothCaps }
}

func TestChooseKernel(t *testing.T) {
	has := func(iptables, ipvs bool) Caps {
		return capsOf(Capability{Supported: iptables, Reason: "no iptables"}, Capability{Supported: ipvs}, nil)
	}
	tests := []struct {
		mode      Mode
		caps      Caps
		want      []DataPlane
		why, only string
	}{
		{ModeUserspace, has(true, true), nil, "mode userspace offloads nothing", ""},
		{ModeIPTables, has(true, true), []DataPlane{IPTables}, "", ""},
		{ModeIPTables, has(false, true), nil, "this host can't do iptables: no iptables", ""},
		{ModeIPVS, has(true, true), []DataPlane{IPVS}, "", ""},
		{ModeIPVS, has(true, false), nil, "this host can't do IPVS", ""},
		{ModeAuto, has(true, true), []DataPlane{IPVS, IPTables}, "", ""},
		{ModeAuto, has(true, false), []DataPlane{IPTables}, "", "this host can't do IPVS"},
		{ModeAuto, has(false, true), []DataPlane{IPVS}, "", "this host can't do iptables: no iptables"},
		{ModeAuto, has(false, false), nil, "this host can't do iptables: no iptables", ""},
	}
	for _, tt := range tests {
		got := chooseKernel(tt.mode, tt.caps.Planes)
		if !slices.Equal(got.names(), tt.want) || got.why != tt.why || got.only != tt.only {
			t.Errorf("%s with %+v: %+v, want %s, %q, %q", tt.mode, tt.caps, got, tt.want, tt.why, tt.only)
		}
		p, _ := Compute(nil, Inputs{Now: t0, Caps: tt.caps, Policy: Policy{Mode: tt.mode}})
		if !slices.Equal(p.Kernel, tt.want) {
			t.Errorf("%s with %+v: plan has %s", tt.mode, tt.caps, p.Kernel)
		}
		for _, d := range []DataPlane{IPTables, IPVS} {
			if got, want := p.Uses(d), slices.Contains(tt.want, d); got != want {
				t.Errorf("%s with %+v: uses %s: %v", tt.mode, tt.caps, d, got)
			}
		}
	}
}

// TestChooseAmongThree: a service gets the first data plane of those that do most of what it
// asks for, and the reason names what kept it from the ones before, or what others lack.
func TestChooseAmongThree(t *testing.T) {
	const third DataPlane = "third"
	tests := []struct {
		name   string
		asks   func(*service.Port)
		want   DataPlane
		reason string
	}{
		{"nothing special", func(*service.Port) {}, third, "third does all that it asks for"},
		{"an algorithm of one", func(p *service.Port) { p.Algorithm = service.SourceHash }, IPVS, "third can't do source hash"},
		{"an algorithm of the last", func(p *service.Port) { p.Algorithm = service.Random }, IPTables, "third can't do random"},
		{"what none does", func(p *service.Port) { p.ProxyProtocol = 1 }, third,
			"third can't send PROXY protocol headers; ipvs can't send PROXY protocol headers; iptables can't send PROXY protocol headers"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			in(ModeAuto)(w)
			w.in.Caps = capsOf(Capability{Supported: true}, Capability{Supported: true}, nil)
			w.in.Caps.Planes = slices.Insert(w.in.Caps.Planes, 0, Abilities{Plane: third, Title: "third", Host: Capability{Supported: true}, TellsClients: true,
				Algorithms: map[service.Algorithm]string{service.RoundRobin: ""}, Otherwise: "round robin"})
			w.set(port("a", tt.asks), "10.0.0.1 n1 ready")
			if s := w.one(); s.Kernel != tt.want || s.KernelReason != tt.reason {
				t.Errorf("%s because %q, want %s because %q", s.Kernel, s.KernelReason, tt.want, tt.reason)
			}
		})
	}
}

const (
	whileDown  = " while kproxy is down"
	byClient   = "ipvs can't choose endpoints by client, as externalTrafficPolicy Local asks"
	onlyHere   = "clients on this node reach only endpoints on this node through its external addresses"
	noMaglev   = "ipvs has no scheduler mh here: no module ip_vs_mh"
	noProxy    = "endpoints get no PROXY protocol header" + whileDown
	allItAsks  = "ipvs does all that it asks for"
	noHeaders  = " can't send PROXY protocol headers"
	toFallback = "qualified (iptables: "
)

// choice holds what is to be decided about the kernel data plane of a service.
type choice struct {
	plane, carries   DataPlane
	scheduler        string
	why              string // that kernel data plane, in mode auto
	reason, degraded string
}

func choiceOf(s *Service) choice {
	return choice{s.Kernel, s.DataPlane, s.Scheduler, s.KernelReason, s.Reason, s.Degraded}
}

var compareChoice = cmp.AllowUnexported(choice{})

func TestKernel(t *testing.T) {
	proxied := func(p *service.Port) { p.ProxyProtocol = 2 }
	tests := []struct {
		name string
		port service.Port
		ipvs choice // in mode ipvs
		auto choice
	}{
		{"nothing special", port("a"),
			choice{IPVS, IPVS, "rr", "", "qualified", ""},
			choice{IPVS, IPVS, "rr", allItAsks, "qualified", ""}},
		{"weighted", port("a", algorithm(service.WeightedRoundRobin)),
			choice{IPVS, IPVS, "wrr", "", "qualified", ""},
			choice{IPVS, IPVS, "wrr", allItAsks, "qualified", ""}},
		{"least connections", port("a", algorithm(service.LeastConnections)),
			choice{IPVS, IPVS, "wlc", "", "qualified", ""},
			choice{IPVS, IPVS, "wlc", allItAsks, "qualified", ""}},
		{"source hash", port("a", algorithm(service.SourceHash)),
			choice{IPVS, IPVS, "sh", "", "qualified", ""},
			choice{IPVS, IPVS, "sh", allItAsks, "qualified", ""}},
		{"random", port("a", algorithm(service.Random)),
			choice{IPVS, Userspace, "rr", "", "ipvs can't do random", "random falls back to scheduler rr" + whileDown},
			choice{IPTables, IPTables, "", "ipvs can't do random", toFallback + "ipvs can't do random)", ""}},
		{"maglev without its module", port("a", algorithm(service.Maglev)),
			choice{IPVS, Userspace, "rr", "", noMaglev, "maglev falls back to scheduler rr" + whileDown},
			choice{IPVS, Userspace, "rr", noMaglev + "; iptables can't do maglev", noMaglev, "maglev falls back to scheduler rr" + whileDown}},
		{"a scheduler", port("a", scheduler("sed")),
			choice{IPVS, IPVS, "sed", "", "qualified", ""},
			choice{IPVS, IPVS, "sed", allItAsks, "qualified", ""}},
		{"a scheduler that was tried in vain", port("a", scheduler("mh")),
			choice{IPVS, Userspace, "rr", "", noMaglev, "scheduler mh falls back to scheduler rr" + whileDown},
			choice{IPVS, Userspace, "rr", noMaglev + "; iptables has no IPVS scheduler mh", noMaglev, "scheduler mh falls back to scheduler rr" + whileDown}},
		{"PROXY protocol", port("a", proxied),
			choice{IPVS, Userspace, "rr", "", "ipvs" + noHeaders, noProxy},
			choice{IPVS, Userspace, "rr", "ipvs" + noHeaders + "; iptables" + noHeaders, "ipvs" + noHeaders, noProxy}},
		{"PROXY protocol and random", port("a", proxied, algorithm(service.Random)),
			choice{IPVS, Userspace, "rr", "", "ipvs can't do random", "random falls back to scheduler rr" + whileDown + "; " + noProxy},
			choice{IPTables, Userspace, "", "ipvs can't do random", "iptables" + noHeaders, noProxy}},
		{"external policy Local", port("a", external, eTPLocal),
			choice{IPVS, IPVS, "rr", "", "qualified", onlyHere + whileDown},
			choice{IPTables, IPTables, "", byClient, toFallback + byClient + ")", ""}},
		{"external policy Local without external addresses", port("a", eTPLocal),
			choice{IPVS, IPVS, "rr", "", "qualified", ""},
			choice{IPVS, IPVS, "rr", allItAsks, "qualified", ""}},
		{"internal policy Local", port("a", func(p *service.Port) { p.InternalLocal = true }),
			choice{IPVS, IPVS, "rr", "", "qualified", ""},
			choice{IPVS, IPVS, "rr", allItAsks, "qualified", ""}},
		{"external policy Local and least connections", port("a", external, eTPLocal, algorithm(service.LeastConnections)),
			choice{IPVS, IPVS, "wlc", "", "qualified", onlyHere + whileDown},
			choice{IPVS, IPVS, "wlc", "iptables can't do least connections", "qualified", onlyHere + whileDown}},
		{"affinity", port("a", func(p *service.Port) { p.Affinity = time.Hour }),
			choice{IPVS, IPVS, "rr", "", "qualified", ""},
			choice{IPVS, IPVS, "rr", allItAsks, "qualified", ""}},
		{"pinned to the kernel", port("a", algorithm(service.Random), func(p *service.Port) { p.Prefer = service.PreferKernel }),
			choice{IPVS, Userspace, "rr", "", "ipvs can't do random", "random falls back to scheduler rr" + whileDown},
			choice{IPTables, IPTables, "", "ipvs can't do random", "pinned to the kernel by its annotation (iptables: ipvs can't do random)", ""}},
	}
	for _, tt := range tests {
		for mode, want := range map[Mode]choice{ModeIPVS: tt.ipvs, ModeAuto: tt.auto} {
			t.Run(tt.name+"/"+string(mode), func(t *testing.T) {
				w := newWorld(t)
				in(mode)(w)
				w.in.Policy.OffloadAfter, w.in.Policy.OffloadMinConnections = 0, 0
				w.set(tt.port, "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
				w.one()
				w.program()
				s := w.one()
				if diff := cmp.Diff(want, choiceOf(s), compareChoice); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				row := s.Row(t0)
				if row.Kernel != s.Kernel || row.KernelReason != s.KernelReason || row.Scheduler != s.Scheduler {
					t.Errorf("status says %s (%s), scheduler %q", row.Kernel, row.KernelReason, row.Scheduler)
				}
			})
		}
	}
}

// TestKernelSCTP: what IPVS can't do, nobody does.
func TestKernelSCTP(t *testing.T) {
	sctp := func(p *service.Port) { p.Protocol = service.SCTP }
	const onlyKernel = "SCTP is served by the kernel only"
	tests := []struct {
		name string
		mode Mode
		port service.Port
		want choice
	}{
		{"plain", ModeAuto, port("a", sctp), choice{IPVS, IPVS, "rr", allItAsks, onlyKernel, ""}},
		{"random", ModeIPVS, port("a", sctp, algorithm(service.Random)),
			choice{IPVS, IPVS, "rr", "", onlyKernel + "; ipvs can't do random", "random falls back to scheduler rr"}},
		{"random in auto", ModeAuto, port("a", sctp, algorithm(service.Random)),
			choice{IPTables, IPTables, "", "ipvs can't do random", onlyKernel + " (iptables: ipvs can't do random)", ""}},
		{"external policy Local", ModeIPVS, port("a", sctp, external, eTPLocal),
			choice{IPVS, IPVS, "rr", "", onlyKernel, onlyHere}},
		{"external policy Local in auto", ModeAuto, port("a", sctp, external, eTPLocal),
			choice{IPTables, IPTables, "", byClient, onlyKernel + " (iptables: " + byClient + ")", ""}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			in(tt.mode)(w)
			w.set(tt.port, "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
			w.one()
			w.program()
			s := w.one()
			if diff := cmp.Diff(tt.want, choiceOf(s), compareChoice); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			for i := range s.Frontends {
				if f := &s.Frontends[i]; s.ShortCircuits(f) || f.ShortCircuit && s.Kernel == IPVS {
					t.Errorf("%s is said to short-circuit clients, which nobody could do", f.Kind)
				}
			}
		})
	}
}

// TestShortCircuits: the clients that userspace has to serve beside IPVS, or where
// nothing else tells them from others.
func TestShortCircuits(t *testing.T) {
	tests := []struct {
		name      string
		mode      Mode
		change    func(*service.Port)
		endpoints []string
		want      map[Kind]bool
	}{
		{"mode ipvs", ModeIPVS, eTPLocal, []string{"10.0.0.1 n1 ready"}, map[Kind]bool{ClusterIP: false, NodePort: true}},
		{"no endpoint on this node", ModeIPVS, eTPLocal, []string{"10.0.0.2 n2 ready"}, map[Kind]bool{ClusterIP: false, NodePort: true}},
		{"no endpoint", ModeIPVS, eTPLocal, nil, map[Kind]bool{ClusterIP: false, NodePort: false}},
		{"policy Cluster", ModeIPVS, func(*service.Port) {}, []string{"10.0.0.1 n1 ready"}, map[Kind]bool{ClusterIP: false, NodePort: false}},
		{"on iptables", ModeAuto, eTPLocal, []string{"10.0.0.1 n1 ready"}, map[Kind]bool{ClusterIP: false, NodePort: false}},
		{"no kernel data plane", ModeUserspace, eTPLocal, []string{"10.0.0.1 n1 ready"}, map[Kind]bool{ClusterIP: false, NodePort: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			in(tt.mode)(w)
			w.set(port("a", external, tt.change), tt.endpoints...)
			s := w.one()
			got := map[Kind]bool{}
			for i := range s.Frontends {
				got[s.Frontends[i].Kind] = s.ShortCircuits(&s.Frontends[i])
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestDegradedNamesPods: pods are short-circuited only where they are known.
func TestDegradedNamesPods(t *testing.T) {
	w := newWorld(t)
	in(ModeIPVS)(w)
	w.in.Policy.PodCIDRs = prefixes("10.0.0.0/16")
	w.set(port("a", external, eTPLocal), "10.0.0.1 n1 ready")
	if got, want := w.one().Degraded, "pods and "+onlyHere+whileDown; got != want {
		t.Errorf("degraded %q, want %q", got, want)
	}
}

// TestPolicyScheduler: the scheduler of --ipvs-scheduler is for services that
// ask for nothing.
func TestPolicyScheduler(t *testing.T) {
	tests := []struct {
		name, policy string
		port         service.Port
		want         string
		why          string
	}{
		{"none", "", port("a"), "rr", ""},
		{"nothing asked for", "sed", port("a"), "sed", ""},
		{"an algorithm asked for", "sed", port("a", algorithm(service.RoundRobin)), "rr", ""},
		{"a scheduler asked for", "sed", port("a", scheduler("wlc")), "wlc", ""},
		{"missing", "mh", port("a"), "rr", noMaglev},
		{"missing, not asked for", "mh", port("a", algorithm(service.SourceHash)), "sh", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			in(ModeIPVS)(w)
			defaultScheduler(tt.policy)(w)
			w.set(tt.port, "10.0.0.1 n1 ready")
			s := w.one()
			if s.Scheduler != tt.want {
				t.Errorf("scheduler %q, want %q", s.Scheduler, tt.want)
			}
			if why := inexpressible(IPVS, s.Port, &w.in); why != tt.why {
				t.Errorf("inexpressible: %q, want %q", why, tt.why)
			}
			if tt.why != "" && s.Degraded != "scheduler "+tt.policy+" falls back to scheduler rr"+whileDown {
				t.Errorf("degraded %q", s.Degraded)
			}
		})
	}
}

// TestKernelMoves: a change that only iptables can express takes an offloaded
// service there by way of userspace, and back.
func TestKernelMoves(t *testing.T) {
	w := newWorld(t)
	w.set(port("a"), "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
	in(ModeAuto)(w)
	for _, m := range []moment{
		{at: 0, do: do(pinTo(service.PreferAuto), carry(1)), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 10, wake: 10},
		{at: 10, do: program, plane: IPVS, state: StateOffloaded, reason: reasonQualified},
		{at: 20, do: change(algorithm(service.Random)), plane: Userspace, state: StateOffloaded, reason: reasonUpdating},
		{at: 21, do: program, plane: IPTables, state: StateOffloaded, reason: toFallback + "ipvs can't do random)"},
		{at: 30, do: change(algorithm(service.SourceHash)), plane: Userspace, state: StateOffloaded, reason: reasonUpdating},
		{at: 31, do: program, plane: IPVS, state: StateOffloaded, reason: reasonQualified},
		// Another host's capabilities, as after a module was loaded.
		{at: 40, do: unusable(map[string]string{"sh": "gone"}),
			plane: Userspace, state: StateUserspace, reason: "ipvs has no scheduler sh here: gone"},
	} {
		w.play(m)
	}
}

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

// fallsShort returns how d falls short of p's specification.
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
