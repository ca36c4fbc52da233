package agent

import (
	"context"
	"errors"
	"fmt"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// mode is one row of the table of modes: what a mode needs of the host, and how
// its rules are made and told apart.
type mode struct {
	// needs is the capability without which the mode can't work; nil for none
	// beyond the portal's.
	needs func(plan.Caps) plan.Capability
	// rules makes the mode's renderer and backend.
	rules func(hostRules) (rules, error)
}

// rules is what the programmer works with in one mode.
type rules struct {
	kernel.Backend
	render     func(*plan.Plan) kernel.Ruleset
	programmed func(have, want kernel.Ruleset, p *plan.Plan) map[service.Key]uint64
	adopted    func(have kernel.Ruleset, s *service.Snapshot) map[service.Key]bool
	watch      watch
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
	routing kernel.Routing
}

// modes is the table. The portal that leads to userspace is made of iptables
// rules and ipsets in every mode.
var modes = map[plan.Mode]mode{
	plan.ModeUserspace: {rules: iptablesRules},
	plan.ModeIPTables:  {needs: func(c plan.Caps) plan.Capability { return c.IPTables }, rules: iptablesRules},
	plan.ModeAuto:      {rules: iptablesRules},
}

// ErrNoMode is the end of an Agent whose mode isn't built in.
var ErrNoMode = errors.New("isn't in this version yet")

// modeOf returns the row of m.
func modeOf(m plan.Mode) (mode, error) {
	row, ok := modes[m]
	if !ok {
		return mode{}, fmt.Errorf("--mode %s %w; use userspace, iptables or auto", m, ErrNoMode)
	}
	return row, nil
}

func iptablesRules(h hostRules) (rules, error) {
	c := iptables.DefaultConfig()
	c.Sets, c.Variant, c.SkipIPv6 = h.sets, h.host.Variant, !h.host.IPv6
	b, err := iptables.New(c)
	if err != nil {
		return rules{}, err
	}
	o := iptables.DefaultOptions()
	o.Marks, o.TCPPort, o.UDPPort = h.marks, h.tcp, h.udp
	o.RandomFully, o.SocketMatch, o.CatchRefusals = h.host.RandomFully, h.host.SocketMatch, h.host.CatchRefusals
	o.SkipIPv6 = !h.host.IPv6
	if err := o.Validate(); err != nil {
		return rules{}, err
	}
	w, err := iptables.NewWatch(b, h.routing)
	if err != nil {
		return rules{}, err
	}
	return rules{Backend: b, watch: w, render: iptables.NewRenderer(o).Render, programmed: iptables.Programmed, adopted: iptables.Adopted}, nil
}
