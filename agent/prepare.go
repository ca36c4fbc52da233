package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Prepare does what takes more than CAP_NET_ADMIN and CAP_NET_RAW, and nothing
// else: it has the kernel load what data planes of the mode may use, and changes
// settings below /proc/sys. A kproxy in a container that isn't privileged, where
// these are read-only, finds them as it needs them afterwards. Nothing is
// programmed, and a kproxy that runs on this node isn't disturbed.
func (a *Agent) Prepare(ctx context.Context) error {
	mode := a.policy.Mode
	if err := checkMode(mode); err != nil {
		return err
	}
	if err := loadConntrack(); err != nil {
		return &kernel.Missing{What: "conntrack", How: "a kernel with CONFIG_NF_CT_NETLINK", Err: err}
	}
	if err := errors.Join(a.enableAccounting(), a.ensureSysctls(kernel.Sysctls())); err != nil {
		return err
	}
	if _, err := a.ensureConntrack(); err != nil { // what isn't possible here isn't necessary either
		return err
	}
	var prepared []any
	for i := range a.planes {
		r := &a.planes[i]
		settings, err := r.sysctls()
		if err != nil {
			return err
		}
		if len(settings) == 0 {
			continue
		}
		if !r.in(mode) {
			prepared = append(prepared, string(r.name), false)
			continue
		}
		if err := errors.Join(r.Probe(ctx, &kernel.Host{}, true), r.missing(mode)); err != nil {
			return err
		}
		supported := r.Abilities(nil, time.Time{}).Host.Supported
		if prepared = append(prepared, string(r.name), supported); !supported {
			continue
		}
		if err := a.ensureSysctls(settings); err != nil {
			return err
		}
	}
	return a.unprepared(prepared)
}

// loadConntrack has the kernel load connection tracking, without which its
// settings aren't there. The question does so, whatever the answer (nfnetlink_rcv_msg).
func loadConntrack() error {
	table, err := conntrack.Dial()
	if err != nil {
		return err
	}
	defer table.Close()
	nowhere := netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	if _, err := table.GetByReply(service.TCP, nowhere, nowhere); err != nil && !errors.Is(err, conntrack.ErrNotFound) {
		return err
	}
	return nil
}

// unprepared is what could not be changed after all.
func (a *Agent) unprepared(prepared []any) error {
	var errs []error
	for _, c := range a.caps.All {
		if !c.Supported {
			errs = append(errs, fmt.Errorf("%s: %s", c.Name, c.Reason))
		}
	}
	if len(errs) == 0 {
		a.log.Info("this node is prepared", prepared...)
		return nil
	}
	return &kernel.Missing{What: "permission to change kernel settings", How: "run this as root, in a privileged container if in one", Err: errors.Join(errs...)}
}
