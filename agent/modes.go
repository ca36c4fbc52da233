package agent

import (
	"errors"
	"fmt"
	"sync/atomic"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
)

// mode is one row of the table of modes: what a mode can't do without. What it
// does is [plan.Compute]'s business: the rules that this host can have are the
// same in every mode, so that one mode removes what another one left.
type mode struct {
	needs plan.DataPlane // empty for nothing beyond the portal's
	what  string         // it is that it needs
	how   string         // to come by it
	ipvs  bool           // it may use IPVS, whose module is loaded then
}

// Explainers are those of the data planes that have one.
func Explainers() []kernel.Explainer { return []kernel.Explainer{ipvs.Explainer{}} }

// planes are the abilities of every data plane in order of mode auto's preference,
// on a host of which rules and virtuals say what it has of iptables and IPVS.
func planes(rules, virtuals plan.Capability, scheduler string, unusable map[string]string) []plan.Abilities {
	return []plan.Abilities{ipvs.Abilities(virtuals, scheduler, unusable), iptables.Abilities(rules)}
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
		needs: plan.IPTables,
		what:  "iptables",
		how:   "get what it says, or choose --mode userspace",
	},
	plan.ModeIPVS: {
		needs: plan.IPVS,
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
	if m.needs == "" {
		return nil
	}
	c := caps.Plane(m.needs).Host
	if c.Supported {
		return nil
	}
	return &kernel.Missing{What: m.what, How: m.how, Err: errors.New(c.Reason)}
}

// planeFor makes the data planes that the host has, in one stack.
func planeFor(h hostRules) (kernel.Plane, error) {
	c := iptables.DefaultConfig()
	c.Runner = countingRunner{c.Runner, h.failures}
	c.Sets, c.Variant, c.SkipIPv6 = h.sets, h.host.Variant, !h.host.IPv6
	o := ruleOptions()
	o.Marks, o.TCPPort, o.UDPPort = h.marks, h.tcp, h.udp
	o.RandomFully, o.SocketMatch, o.CatchRefusals = h.host.RandomFully, h.host.SocketMatch, h.host.CatchRefusals
	o.SkipIPv6, o.DropInvalid = !h.host.IPv6, !h.liberal
	tables, err := iptables.NewPlane(c, o, h.routing)
	if err != nil || h.ipvs.Table == nil {
		return kernel.NewStack(tables), err
	}
	virtual := ipvs.DefaultOptions()
	virtual.Marks, virtual.CatchRefusals, virtual.SkipIPv6 = h.marks, h.host.CatchRefusals, !h.host.IPv6
	h.ipvs.Sets = h.sets
	top, err := ipvs.NewPlane(h.ipvs, virtual, tables)
	return kernel.NewStack(top), err
}

// ruleOptions are those for a host that has everything, and every plane's way.
func ruleOptions() iptables.Options {
	o := iptables.DefaultOptions()
	o.Ways = append(o.Ways, ipvs.Way)
	return o
}
