package compare

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// rig is the network of one plane.
type rig struct {
	load.Rig
	plane    plan.DataPlane
	table    *conntrack.Client
	services int    // that are programmed
	iptables string // variant that kproxy found
}

// unavailable is the error about a plane that this host doesn't have.
type unavailable struct{ reason string }

func (u *unavailable) Error() string { return u.reason }

// backends of a rig. More than one, so that there is a choice to make.
const backends = 3

// exitHost is kproxy's exit status where the host lacks something.
const exitHost = 3

func newRig(c Config, p plan.DataPlane) *rig {
	cfg := lab.DefaultConfig()
	cfg.Prefix, cfg.Backends, cfg.IPv6 = c.Prefix+"-"+string(p), backends, false
	return &rig{plane: p, Rig: load.Rig{Net: lab.New(cfg), Dir: rigDir(cfg.Prefix), Command: []string{c.Program, "lab", "compare-process"}, Slow: c.Slow}}
}

// rigDir is short: the path of a socket ends at 107 bytes (unix(7)).
func rigDir(prefix string) string { return filepath.Join("/run", prefix) }

// Down removes what a comparison with this prefix left behind.
func Down(prefix string) error {
	var errs []error
	for _, p := range Planes {
		name := prefix + "-" + string(p)
		errs = append(errs, lab.DownAll(name), os.RemoveAll(rigDir(name)))
	}
	return errors.Join(errs...)
}

// up builds the network and starts server and proxy. When it fails, nothing is
// left; an *unavailable says that this host can't have the plane.
func (r *rig) up(ctx context.Context) error {
	err := r.Rig.Up(ctx)
	if err == nil && r.plane != Direct {
		err = r.startProxy(ctx)
	}
	if err == nil {
		err = r.Net.Node.Do(func() (err error) {
			r.table, err = conntrack.Dial()
			return err
		})
	}
	if err != nil {
		err = errors.Join(err, r.down())
	}
	return err
}

// down takes it down, also when it is half up.
func (r *rig) down() error {
	var errs []error
	if r.table != nil {
		errs = append(errs, r.table.Close())
	}
	if r.Proxy != nil && r.Proxy.Running() {
		errs = append(errs, r.Proxy.Kill())
	}
	return errors.Join(append(errs, r.Rig.Down())...)
}

func (r *rig) startProxy(ctx context.Context) error {
	// All of the services have the same endpoints.
	err := r.StartKProxy(ctx, r.Command[0], r.plane, "--alive-timeout", min(r.Within(5*time.Second), 30*time.Second).String())
	var exit *exec.ExitError
	if err != nil && !r.Proxy.Running() && errors.As(r.Proxy.Wait(ctx), &exit) && exit.ExitCode() == exitHost {
		return &unavailable{lastLine(r.Proxy.Log())}
	}
	if err != nil {
		return err
	}
	st, err := r.KProxy.Status(ctx)
	for _, c := range st.Capabilities {
		if c.Name == "iptables" {
			r.iptables = c.Reason
		}
	}
	return err
}

// fillerPort is the port of the services that there are many of.
const fillerPort = 80

// filler is the address of the i-th of the services that there are many of, i
// from 0; one of them carries first packets.
func filler(i int) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], 10<<24|97<<16+uint32(i)+1)
	return netip.AddrFrom4(b)
}

// writeFillers writes the services from, from+1, … to-1 as one file.
func (r *rig) writeFillers(from, to int) error {
	var all []lab.Manifest
	for i := from; i < to; i++ {
		m := r.Manifest(fmt.Sprintf("service-%05d", i), filler(i), r.plane)
		m.Ports = []lab.ManifestPort{{Name: "answer", Protocol: "TCP", Port: fillerPort, Target: load.First.Port()}}
		all = append(all, m)
	}
	return lab.WriteManifests(filepath.Join(r.Manifests(), fmt.Sprintf("services-%d.yaml", to)), all...)
}

// grow adds services until there are n, and returns how long that took: from
// the write until kproxy says that all are programmed. What asking for that
// takes makes it a little longer.
func (r *rig) grow(ctx context.Context, n int) (time.Duration, error) {
	if r.plane == Direct {
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.Within(4*time.Minute))
	defer cancel()
	start := time.Now()
	if err := r.writeFillers(r.services, n); err != nil {
		return 0, err
	}
	r.services = n
	for {
		asked := time.Now()
		err := r.Programmed(ctx, r.plane, n)
		took := time.Since(start)
		if err == nil {
			return took, errors.Join(r.settle(ctx), r.reach(ctx, n))
		}
		// Asking costs kproxy time: it gets at least as much for its own work.
		if ended := lab.Sleep(ctx, max(20*time.Millisecond, 2*time.Since(asked))); ended != nil {
			return took, fmt.Errorf("wait for %d services in %s: %w: %w", n, r.plane, ended, err)
		}
	}
}

// settle waits until kproxy is idle, so that its work on services isn't counted as
// that on packets. It waits for some seconds at most.
func (r *rig) settle(ctx context.Context) error {
	return load.Idle{Window: 300 * time.Millisecond, Busy: 20 * time.Millisecond, AtMost: r.Within(10 * time.Second)}.Wait(ctx, r.Proxy.PID())
}

// reach makes sure that the first and the last of n services answer, through
// the plane.
func (r *rig) reach(ctx context.Context, n int) error {
	for _, i := range []int{0, n - 1} {
		l := load.Load{Kind: load.First, Conns: 1, Count: 3, Time: r.Within(time.Second)}
		if _, err := r.measure(ctx, l, filler(i)); err != nil {
			return fmt.Errorf("reach service %d of %d: %w", i+1, n, err)
		}
	}
	return nil
}

// subject is the rig as a subject of a measurement; first is the filler for first packets.
func (r *rig) subject(first netip.Addr) load.Subject {
	s := load.Subject{Name: string(r.plane), Class: report.KProxy, Proxied: true}
	if r.plane == Direct {
		s.Class, s.Proxied = report.Limit, false
	}
	s.Run = func(ctx context.Context, l load.Load) (load.Outcome, error) { return r.measure(ctx, l, first) }
	return s
}

// measure runs a load through the plane and makes sure that it went there; first
// is the filler for first packets.
func (r *rig) measure(ctx context.Context, l load.Load, first netip.Addr) (load.Outcome, error) {
	var proxies []int
	switch {
	case r.plane == Direct:
		for _, b := range r.Net.Backends {
			l.Targets = append(l.Targets, b.Address(false, l.Kind.Port()))
		}
	case l.Kind == load.First:
		l.Targets = []netip.AddrPort{netip.AddrPortFrom(first, fillerPort)}
	default:
		l.Targets = []netip.AddrPort{netip.AddrPortFrom(load.ServiceAddress, l.Kind.Port())}
	}
	if r.Proxy != nil {
		proxies = []int{r.Proxy.PID()}
	}
	out, err := r.Load(ctx, l, proxies...)
	if err == nil && out.Count == 0 {
		err = fmt.Errorf("nothing of it succeeded: %s", out.Error)
	}
	var flows []conntrack.Flow
	if err == nil {
		// The protocol isn't asked for: filtered dumps are newer than some kernels.
		flows, err = r.table.List()
	}
	if err == nil {
		err = checkCarried(r.plane, l.Kind, out.Witnesses, flows)
	}
	if err != nil {
		return out, fmt.Errorf("load %s through %s: %w", l.Kind, r.plane, err)
	}
	return out, nil
}

// carrier is the plane that a flow went through, by what the kernel did with
// it. A flow that wasn't rewritten was routed. One rewritten to an endpoint went
// there by a rule's DNAT, or by IPVS, which leaves no mark of NAT. One rewritten
// to anything else, the node, ended at kproxy's listener.
func carrier(f *conntrack.Flow) plan.DataPlane {
	switch {
	case !f.Rewritten():
		return Direct
	case !lab.PodCIDR4.Contains(f.ReplySrc.Addr()):
		return plan.Userspace
	case f.DestinationNAT():
		return plan.IPTables
	}
	return plan.IPVS
}

// shown is the plane as which carrier knows p: whose rule rewrote a flow doesn't show,
// and the node of a rig has the rules of one plane.
func shown(p plan.DataPlane) plan.DataPlane {
	if p == plan.NFTables {
		return plan.IPTables
	}
	return p
}

// tuple is the key of a connection in the kernel's table.
type tuple struct {
	protocol    service.Protocol
	client, dst netip.AddrPort
}

// checkCarried makes sure that p carried every witness of a load. The
// kernel keeps TCP connections that have ended for two minutes, those that were reset
// for ten seconds, and UDP ones for half a minute.
func checkCarried(p plan.DataPlane, k load.Kind, witnesses []load.Witness, flows []conntrack.Flow) error {
	if len(witnesses) == 0 {
		return errors.New("no connection is known that could tell what carried the load")
	}
	protocol := service.TCP
	if k.UDP() {
		protocol = service.UDP
	}
	known := map[tuple]*conntrack.Flow{}
	for i := range flows {
		f := &flows[i]
		known[tuple{f.Protocol, f.OrigSrc, f.OrigDst}] = f
	}
	for _, w := range witnesses {
		f, ok := known[tuple{protocol, w.Client, w.Target}]
		switch {
		case !ok && (p == Direct || p == plan.Userspace):
			// Without a rule that needs it, connections aren't tracked. No rule of the
			// kernel's planes does without.
		case !ok:
			return fmt.Errorf("the connection from %s to %s should have gone through %s, and the kernel's table doesn't have it", w.Client, w.Target, p)
		case carrier(f) != shown(p):
			return fmt.Errorf("the connection %s should have gone through %s, and went through %s", f, p, carrier(f))
		}
	}
	return nil
}
