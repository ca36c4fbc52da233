package agent

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// mode is one row of the table of modes: what a mode can't do without. What it
// does is [plan.Compute]'s business: the rules that this host can have are the
// same in every mode, so that one mode removes what another one left.
type mode struct {
	needs func(plan.Caps) plan.Capability // nil for nothing beyond the portal's
	what  string                          // it is that it needs
	how   string                          // to come by it
	ipvs  bool                            // it may use IPVS, whose module is loaded then
}

// Explainers are those of the data planes that have one.
func Explainers() []kernel.Explainer { return []kernel.Explainer{ipvs.Explainer{}} }

// rules is what the programmer works with in one mode.
type rules struct {
	kernel.Backend
	// render is given every plan that is to be programmed, with what leads there from
	// the one before.
	render func(*plan.Plan, plan.Delta) kernel.Ruleset
	// fresh is render for plans of any origin, from any goroutine: it remembers nothing.
	fresh      func(*plan.Plan) kernel.Ruleset
	programmed func(have, want kernel.Ruleset, p *plan.Plan) map[service.Key]uint64
	adopted    func(have kernel.Ruleset, s *service.Snapshot) map[service.Key]bool
	watch      watch
	// counts reads what the shared rules count.
	counts func(context.Context) (kernel.Counts, error)
	// drain removes what has drained and says how many real servers are left that
	// drain; nil where nothing ever does.
	drain func(context.Context) (left int, err error)
}

// watch notices when somebody else changes what kproxy has in the kernel.
type watch interface {
	// Expect tells what is in the kernel now.
	Expect(kernel.Ruleset)
	// Check returns what differs from that, a phrase each.
	Check(context.Context) ([]string, error)
	Close()
}

// hostRules is what a mode's rules depend on besides the plan.
type hostRules struct {
	host    *kernel.Host
	sets    kernel.SetStore
	marks   kernel.Marks
	tcp     uint16 // ports of the shared listeners
	udp     uint16
	routing steering.Routing
	liberal bool // conntrack is
	// failures counts those of iptables-restore.
	failures *[2]atomic.Uint64
	ipvs     ipvs.Config // without Table where there is none
}

// modes is the table. The portal that leads to userspace is made of iptables
// rules and ipsets in every mode.
var modes = map[plan.Mode]mode{
	plan.ModeUserspace: {},
	plan.ModeIPTables: {
		needs: func(c plan.Caps) plan.Capability { return c.IPTables },
		what:  "iptables",
		how:   "get what it says, or choose --mode userspace",
	},
	plan.ModeIPVS: {
		needs: func(c plan.Caps) plan.Capability { return c.IPVS },
		what:  "IPVS",
		how:   "get it, or choose --mode iptables, or auto, which does without",
		ipvs:  true,
	},
	plan.ModeAuto: {ipvs: true},
}

// ErrNoMode is the end of an Agent whose mode isn't one.
var ErrNoMode = errors.New("is no mode")

// modeOf returns the row of m.
func modeOf(m plan.Mode) (mode, error) {
	row, ok := modes[m]
	if !ok {
		return mode{}, fmt.Errorf("--mode %s %w; use auto, userspace, iptables or ipvs", m, ErrNoMode)
	}
	return row, nil
}

// missing says what mode m lacks on a host with caps; nil if nothing.
func (m mode) missing(caps plan.Caps) error {
	if m.needs == nil {
		return nil
	}
	c := m.needs(caps)
	if c.Supported {
		return nil
	}
	return &kernel.Missing{What: m.what, How: m.how, Err: errors.New(c.Reason)}
}

// rulesFor makes the rules of every data plane that the host has.
func rulesFor(h hostRules) (rules, error) {
	r, err := iptablesRules(h)
	if err != nil || h.ipvs.Table == nil {
		return r, err
	}
	return withIPVS(r, h)
}

func iptablesRules(h hostRules) (rules, error) {
	c := iptables.DefaultConfig()
	c.Runner = countingRunner{c.Runner, h.failures}
	c.Sets, c.Variant, c.SkipIPv6 = h.sets, h.host.Variant, !h.host.IPv6
	b, err := iptables.New(c)
	if err != nil {
		return rules{}, err
	}
	o := ruleOptions()
	o.Marks, o.TCPPort, o.UDPPort = h.marks, h.tcp, h.udp
	o.RandomFully, o.SocketMatch, o.CatchRefusals = h.host.RandomFully, h.host.SocketMatch, h.host.CatchRefusals
	o.SkipIPv6, o.DropInvalid = !h.host.IPv6, !h.liberal
	if err := o.Validate(); err != nil {
		return rules{}, err
	}
	w, err := iptables.NewWatch(b, h.routing)
	if err != nil {
		return rules{}, err
	}
	return rules{Backend: b, counts: b.Counts, watch: w, render: iptables.NewRenderer(o).Render, fresh: func(p *plan.Plan) kernel.Ruleset { return iptables.Render(p, o) }, programmed: iptables.Programmed, adopted: iptables.Adopted}, nil
}

// ruleOptions are those for a host that has everything, and every plane's way.
func ruleOptions() iptables.Options {
	o := iptables.DefaultOptions()
	o.Ways = append(o.Ways, ipvs.Way)
	return o
}
