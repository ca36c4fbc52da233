package ipvs_test

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

func rulesOptions() steering.Options {
	o := steering.DefaultOptions()
	o.Planes = []steering.Plane{iptables.InSteering, ipvs.InSteering}
	o.TCPPort, o.UDPPort = 4001, 4002
	return o
}

// render is everything that the agent programs for a plan.
func render(p *plan.Plan) kernel.Ruleset {
	return kernel.Merge(iptables.Render(p, rulesOptions()), ipvs.Render(p, steering.DefaultOptions()))
}

// conformingModes are those with virtual servers: IPVS alone, and with iptables
// beneath some services.
var conformingModes = []plan.Mode{plan.ModeIPVS, plan.ModeAuto}

func TestConformanceOfModel(t *testing.T) {
	for _, mode := range conformingModes {
		t.Run(string(mode), func(t *testing.T) {
			kerneltest.Conformance(t, kerneltest.Mode{Mode: mode, Plane: plan.IPVS, Seeds: 60, Steps: 25, EveryCall: true, Render: render, Open: openModel})
		})
	}
}

func openModel(t *testing.T, faults *kerneltest.Faults) kerneltest.System {
	h := kerneltest.NewHost()
	for _, v := range foreignVirtuals() {
		if err := h.AddForeignVirtual(v); err != nil {
			t.Fatal(err)
		}
	}
	return modelSystem(t, h, faults)
}

// foreignVirtuals are somebody else's.
func foreignVirtuals() []kernel.Virtual {
	return []kernel.Virtual{{
		Protocol: service.UDP, Address: netip.MustParseAddrPort("[fd00:99::1]:53"), Scheduler: "wlc", Persistence: 300,
		Reals: []kernel.Real{{Address: netip.MustParseAddrPort("[fd00:99::2]:53"), Weight: 1}, {Address: netip.MustParseAddrPort("[fd00:99::3]:53")}},
	}}
}

func modelSystem(t *testing.T, h *kerneltest.Host, faults *kerneltest.Faults) kerneltest.System {
	b := ipvs.New(ipvs.Config{
		Rules: h.Rules(faults), Sets: faults.Sets(h.Sets()), Table: faults.Table(h.Table()), Link: faults.Link(h.Link()),
		DrainTimeout: time.Hour,
	})
	return kerneltest.System{
		Backend: b,
		Foreign: func(t *testing.T) string { return h.ForeignVirtuals() },
		State:   func(*testing.T) string { return h.State() },
		Drain:   b.Drain,
		Restart: func(t *testing.T) kerneltest.System { return modelSystem(t, h, faults) },
		AddForeign: func(t *testing.T, v kernel.Virtual) {
			_ = h.AddForeignReal(v, foreignReal(v)) // there may be one already
		},
		RemoveForeign: func(*testing.T) { h.RemoveForeignReals() },
		Take: func(t *testing.T, there bool) {
			if !there {
				h.RemoveForeignVirtual(kerneltest.Taken())
			} else if err := h.AddForeignVirtual(kerneltest.Taken()); err != nil {
				t.Fatal(err)
			}
		},
		Host: h,
	}
}

// openTable is the table of the namespace of the calling thread.
func openTable(t *testing.T) *ipvs.Netlink {
	t.Helper()
	if err := ipvs.Load(); err != nil {
		t.Skipf("needs IPVS in the kernel: %v", err)
	}
	table, err := ipvs.OpenTable()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(table.Close)
	return table
}

func TestConformanceOfKernel(t *testing.T) {
	for _, mode := range conformingModes {
		t.Run(string(mode), func(t *testing.T) {
			openTable(t)
			kerneltest.Conformance(t, kerneltest.Mode{Mode: mode, Plane: plan.IPVS, Seeds: 2, Steps: 11, Render: render, Open: openKernel})
		})
	}
}

func openKernel(t *testing.T, faults *kerneltest.Faults) kerneltest.System {
	kerneltest.Namespace(t)
	table := openTable(t)
	run(t, "ipset create FOREIGN hash:ip; ipset add FOREIGN 192.0.2.1; ip link add foreign0 type dummy; ip link set foreign0 addrgenmode none; ip link set foreign0 up; "+
		"ip addr add 10.96.0.1/32 dev foreign0; ip addr add fd00:99::1/128 dev foreign0 nodad")
	for _, v := range foreignVirtuals() {
		add(t, table, v)
	}
	return kernelSystem(t, table, faults)
}

func add(t *testing.T, table ipvs.Table, v kernel.Virtual) {
	t.Helper()
	if err := change(table, ipvs.Add, v); err != nil {
		t.Fatal(err)
	}
	for _, r := range v.Reals {
		if err := change(table, ipvs.Add, v, r); err != nil {
			t.Fatal(err)
		}
	}
}

func kernelSystem(t *testing.T, table *ipvs.Netlink, faults *kerneltest.Faults) kerneltest.System {
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sets.Close)
	link, err := ipvs.OpenLink()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(link.Close)
	rules := steering.DefaultEnv(nil)
	rules.Runner, rules.Rules, rules.Sets = faults.Runner(kernel.Exec{}), faults.Rules(steering.OpenSingleRules), faults.Sets(sets)
	b := ipvs.New(ipvs.Config{
		Rules: iptables.New(rules), Sets: rules.Sets, Table: faults.Table(table), Link: faults.Link(link), DrainTimeout: time.Hour,
	})
	return kerneltest.System{
		Backend: b,
		Foreign: func(t *testing.T) string {
			return foreignServers(t, table) + run(t, "ipset save FOREIGN; ip -o addr show dev foreign0 | sed 's/valid_lft.*//'")
		},
		State:      func(t *testing.T) string { return ownState(t, table, sets, link) },
		Drain:      b.Drain,
		Restart:    func(t *testing.T) kerneltest.System { return kernelSystem(t, table, faults) },
		AddForeign: func(t *testing.T, v kernel.Virtual) { _ = change(table, ipvs.Add, v, foreignReal(v)) },
		RemoveForeign: func(t *testing.T) {
			for _, s := range list(t, table) {
				_ = change(table, ipvs.Delete, s.Virtual, foreignReal(s.Virtual))
			}
		},
		Take: func(t *testing.T, there bool) {
			if there {
				add(t, table, kerneltest.Taken())
			} else if err := change(table, ipvs.Delete, kerneltest.Taken()); err != nil {
				t.Fatal(err)
			}
		},
	}
}

func list(t *testing.T, table ipvs.Table) []ipvs.Server {
	t.Helper()
	servers, err := table.List()
	if err != nil {
		t.Fatal(err)
	}
	return servers
}

// isForeign: the one that a walk may want as well has its own real servers.
func isForeign(s ipvs.Server) bool {
	return slices.ContainsFunc(append(foreignVirtuals(), kerneltest.Taken()), func(f kernel.Virtual) bool {
		return kernel.CompareVirtuals(f, s.Virtual) == 0 && slices.Equal(f.Reals, s.Reals)
	})
}

func foreignServers(t *testing.T, table ipvs.Table) string {
	var out strings.Builder
	for _, s := range list(t, table) {
		if isForeign(s) {
			fmt.Fprintln(&out, s.Virtual)
		} else if slices.ContainsFunc(s.Reals, func(r kernel.Real) bool { return r == foreignReal(s.Virtual) }) {
			fmt.Fprintln(&out, "foreign real server in", s.Protocol, s.Address)
		}
	}
	return out.String()
}

// ownState prints of the kernel what [kerneltest.Host.State] prints of the model.
func ownState(t *testing.T, table ipvs.Table, sets kernel.SetStore, link ipvs.Link) string {
	t.Helper()
	var out strings.Builder
	states, err := sets.List(kerneltest.AllEntries)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range states {
		fmt.Fprintln(&out, "set", s.Name, s.Entries)
	}
	for _, s := range list(t, table) {
		if !isForeign(s) {
			s.Reals = slices.DeleteFunc(s.Reals, func(r kernel.Real) bool { return r.Address == foreignReal(s.Virtual).Address })
			fmt.Fprintln(&out, s.Virtual)
		}
	}
	l, err := link.State()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(&out, l.Addresses)
	return out.String()
}

// run runs a shell command that must succeed.
func run(t testing.TB, command string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", command).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}
