package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/plan"
)

// probeIPVS finds out what this host can do with IPVS. The module is loaded only
// for a mode that may use it.
func (a *Agent) probeIPVS(ctx context.Context, row mode) error {
	c := plan.Capability{Name: "ipvs", Reason: fmt.Sprintf("not looked for in mode %s", a.policy.Mode)}
	if row.ipvs {
		var err error
		a.schedulers.always = ipvs.Schedulers(a.cfg.IPVS.Scheduler)
		if c, a.schedulers.known, err = ipvs.Probe(ctx, a.schedulers.always); err != nil {
			return err
		}
	}
	a.virtuals = c
	a.caps.Planes = planes(a.rules, c, a.cfg.IPVS.Scheduler, a.schedulers.known)
	return nil
}

// virtualServers is the kernel's IPVS.
type virtualServers struct {
	table *ipvs.Netlink
	link  *ipvs.Dummy
}

// config is what rules are made with; none for nil.
func (v *virtualServers) config(drainTimeout time.Duration) ipvs.Config {
	if v == nil {
		return ipvs.Config{}
	}
	return ipvs.Config{Table: v.table, Link: v.link, DrainTimeout: min(drainTimeout, ipvs.MaxDrainTimeout)}
}

// openIPVS opens IPVS for a mode that uses it, and for one that finds virtual
// servers of an earlier kproxy, which are to go. It returns nil where there is
// neither.
func (a *Agent) openIPVS(row mode, sets kernel.SetStore) (*virtualServers, error) {
	if !row.ipvs || !a.virtuals.Supported {
		left, err := leftVirtualServers(sets)
		if err != nil || !left {
			return nil, err
		}
	}
	v := &virtualServers{}
	var err error
	if v.table, err = ipvs.OpenTable(); err != nil {
		return nil, err
	}
	if v.link, err = ipvs.OpenLink(); err != nil {
		return nil, err
	}
	return v, nil
}

// leftVirtualServers reports whether there is a record of virtual servers of
// kproxy's, and IPVS is still in the kernel.
func leftVirtualServers(sets kernel.SetStore) (bool, error) {
	if _, err := os.Stat("/proc/thread-self/net/ip_vs"); err != nil {
		return false, nil
	}
	record := ipvs.Sets()
	isRecord := func(name string) bool {
		return slices.ContainsFunc(record, func(s kernel.Set) bool { return s.Name == name })
	}
	states, err := sets.List(isRecord)
	if err != nil {
		return false, fmt.Errorf("look for virtual servers of an earlier kproxy: %w", err)
	}
	return slices.ContainsFunc(states, func(s kernel.SetState) bool { return isRecord(s.Name) }), nil
}

// prepareIPVS makes the kernel's settings what IPVS needs.
func (a *Agent) prepareIPVS(v *virtualServers) error {
	if err := a.ensureIPVSSysctls(); err != nil {
		return err
	}
	established, err := establishedTimeout()
	if err != nil {
		return err
	}
	c := a.cfg.IPVS
	now, err := v.table.SetTimeouts(ipvs.Timeouts{TCP: c.TCPTimeoutOf(established), TCPFin: c.TCPFinTimeout, UDP: c.UDPTimeout})
	if err != nil {
		return err
	}
	a.log.Info("time-outs of IPVS", "tcp", now.TCP, "tcp after fin", now.TCPFin, "udp", now.UDP)
	return nil
}

func (a *Agent) ensureIPVSSysctls() error {
	release, err := ipvs.Release()
	if err != nil {
		return err
	}
	return a.ensureSysctls(ipvs.Sysctls(release, a.cfg.IPVS.StrictARP))
}

// establishedTimeout is how long conntrack keeps an idle TCP connection.
func establishedTimeout() (time.Duration, error) {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established")
	if err != nil {
		return 0, fmt.Errorf("read conntrack's time-out: %w", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("read conntrack's time-out: %w", err)
	}
	return time.Duration(n) * time.Second, nil
}

// tryScheduler says why a scheduler can't be used.
func (v *virtualServers) tryScheduler(name string) error {
	found, err := ipvs.ProbeSchedulers(context.Background(), v.table, []string{name})
	if err != nil {
		return err
	}
	if why := found[name]; why != "" {
		return errors.New(why)
	}
	return nil
}
