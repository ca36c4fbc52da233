package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/plan"
)

// rigConfig says what rigs are made of.
type rigConfig struct {
	prefix      string // of the namespaces' names
	program     string // the benchmark itself: client, server and its own proxies
	kproxy      string // the program
	descriptors int    // how many file descriptors a process may have
}

// clients is how many addresses the client has, for UDP sessions from ports that
// weren't used before.
const clients = 16

// rig is a subject, set up.
type rig struct {
	load.Rig
	subject *subject
	config  rigConfig
	tracks  bool           // the node tracks connections
	plane   plan.DataPlane // of kproxy's service
}

// newRig describes a rig; nothing exists before up.
func newRig(c rigConfig, s *subject) *rig {
	network := lab.DefaultConfig()
	network.Prefix = c.prefix + "-" + strings.ReplaceAll(strings.ToLower(s.name), ".", "")
	network.Backends, network.Clients, network.IPv6 = 1, clients, false
	return &rig{subject: s, config: c, Rig: load.Rig{Net: lab.New(network), Dir: filepath.Join("/run", network.Prefix), Command: []string{c.program}}}
}

// up builds the network and starts server and proxy. When it fails, nothing is left.
func (r *rig) up(ctx context.Context) error {
	err := r.Rig.Up(ctx)
	for _, ns := range []*lab.Namespace{r.Net.Client, r.Net.Node, r.Net.Backends[0].Namespace} {
		if err == nil { // all ports for clients and proxies
			err = ns.Do(func() error {
				return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("10000 65535"), 0)
			})
		}
	}
	if err == nil && r.subject.start != nil {
		err = r.subject.start(ctx, r)
	}
	if err == nil {
		err = r.reach(ctx)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("set up %s: %w", r.subject.name, err), r.down())
	}
	return err
}

// measured is the subject of a measurement.
func (r *rig) measured() load.Subject {
	return load.Subject{Name: r.subject.name, Class: r.subject.class, Proxied: r.Proxy != nil}
}

// down takes it down, also when it is half up.
func (r *rig) down() error { return errors.Join(r.stopProxy(), r.Rig.Down()) }

// node is the node's address on the client's side.
func (r *rig) node() netip.Addr { return r.Net.Config.NodeAddresses()[0] }

func (r *rig) server() netip.Addr { return r.Net.Backends[0].Addresses[0] }

// target returns where a kind of load goes.
func (r *rig) target(k load.Kind) netip.AddrPort {
	to := []netip.Addr{r.server(), r.node(), load.ServiceAddress}[r.subject.way]
	return netip.AddrPortFrom(to, k.Port())
}

// reach waits until loads go through.
func (r *rig) reach(ctx context.Context) error {
	for _, k := range []load.Kind{load.Exchange, load.Datagram} {
		for deadline := time.Now().Add(10 * time.Second); r.subject.carries(k); {
			out, err := r.Load(ctx, load.Load{Kind: k, Conns: 1, Time: 20 * time.Millisecond, Targets: []netip.AddrPort{r.target(k)}})
			if err == nil && out.Count > 0 {
				break
			}
			if ctx.Err() != nil || time.Now().After(deadline) {
				return errors.Join(fmt.Errorf("reach the server with kind %s: %s", k, out.Error), err, ctx.Err())
			}
		}
	}
	return nil
}

// load runs a load through the subject, and checks that the subject carried it: a
// proxy has used the processor for it, and kproxy says where its services are.
func (r *rig) load(ctx context.Context, l load.Load) (out load.Outcome, err error) {
	proxies, err := r.processes()
	if err != nil {
		return out, err
	}
	l.Targets = []netip.AddrPort{r.target(l.Kind)}
	if out, err = r.Load(ctx, l, proxies...); err != nil {
		return out, err
	}
	// Asked for its status, kproxy reads the kernel's table: it is emptied before.
	if err := r.forget(); err != nil || r.Proxy == nil {
		return out, err
	}
	if !r.Proxy.Running() {
		return out, fmt.Errorf("%s ended: %s", r.subject.name, r.Proxy.Log())
	}
	if out.CPU.Proxy <= 0 && r.plane != plan.NFTables {
		return out, fmt.Errorf("%s has used no processor time for its load", r.subject.name)
	}
	if r.KProxy == nil {
		return out, nil
	}
	if err := r.Programmed(ctx, r.plane, 0); err != nil {
		return out, err
	}
	// Until kproxy has read the events of every flow that the kernel forgot.
	return out, load.Idle{Window: 100 * time.Millisecond, Busy: 10 * time.Millisecond, AtMost: 5 * time.Second}.Wait(ctx, r.Proxy.PID())
}

// forget empties the kernel's connection table, so that no run meets what an
// earlier one left there, and the table's bound; and ends the sockets that wait for TIME_WAIT to pass. Without the table
// the kernel can't tell that a client takes its port again for another service, and so doesn't take another port where both
// lead to one listener: such a socket would answer the SYN, and the client send it again.
func (r *rig) forget() error {
	if !r.tracks {
		return nil
	}
	flushed := r.Net.Node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
	if out, err := r.Net.Node.Command(context.Background(), "ss", "--kill", "--tcp", "state", "time-wait").CombinedOutput(); err != nil {
		return errors.Join(flushed, fmt.Errorf("end sockets in TIME_WAIT: %w: %s", err, out))
	}
	return flushed
}

// restart ends the proxy and starts it again.
func (r *rig) restart(ctx context.Context) error {
	if r.Proxy == nil {
		return nil
	}
	if err := errors.Join(r.stopProxy(), r.forget()); err != nil {
		return err
	}
	if err := r.Proxy.Start(); err != nil {
		return err
	}
	if r.KProxy != nil {
		if err := r.AwaitProgrammed(ctx, r.plane); err != nil {
			return err
		}
	}
	return r.reach(ctx)
}

// processes are the proxy's process and its children.
func (r *rig) processes() ([]int, error) {
	if r.Proxy == nil {
		return nil, nil
	}
	pid := r.Proxy.PID()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // of whichever thread started them
	var text []byte
	for _, file := range threads {
		of, _ := os.ReadFile(file) // threads come and go
		text = append(text, of...)
	}
	if err != nil || threads == nil {
		return nil, fmt.Errorf("list children of %s: %w", r.subject.name, cmp.Or(err, os.ErrNotExist))
	}
	out := []int{pid}
	for field := range strings.FieldsSeq(string(text)) {
		child, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("list children of %s: %w", r.subject.name, err)
		}
		out = append(out, child)
	}
	return out, nil
}

// stopProxy ends the proxy's process and its children, which keep a copy of its
// output open: waiting for it would not end while they live. kproxy stops in order,
// so that the next one finds nothing of it.
func (r *rig) stopProxy() error {
	if r.Proxy == nil || !r.Proxy.Running() {
		return nil
	}
	if r.KProxy != nil {
		return r.Proxy.Stop(10 * time.Second)
	}
	pids, err := r.processes()
	if err != nil {
		return errors.Join(err, r.Proxy.Kill())
	}
	_ = unix.Kill(pids[0], unix.SIGSTOP) // nginx would start others instead
	for _, pid := range pids[1:] {
		_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
	}
	return r.Proxy.Kill()
}

// memory is the resident memory of the proxy's processes, in bytes (VmRSS of
// proc_pid_status(5)); 0 without a proxy.
func (r *rig) memory() (uint64, error) {
	pids, err := r.processes()
	if err != nil {
		return 0, err
	}
	var sum uint64
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0, fmt.Errorf("read memory of %s: %w", r.subject.name, err)
		}
		_, after, _ := strings.Cut(string(text), "VmRSS:")
		var kib uint64
		if _, err := fmt.Sscanf(after, "%d kB", &kib); err != nil {
			return 0, fmt.Errorf("read memory of %s: %w", r.subject.name, err)
		}
		sum += kib << 10
	}
	return sum, nil
}
