package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

// ServiceAddress is where clients reach the service that [Rig.StartKProxy] makes.
var ServiceAddress = netip.MustParseAddr("10.96.0.10")

// Manifests is the folder that kproxy reads services from.
func (r *Rig) Manifests() string { return filepath.Join(r.Dir, "manifests") }

// Manifest describes a service without ports of all backends, which kproxy keeps
// in a data plane.
func (r *Rig) Manifest(name string, address netip.Addr, in plan.DataPlane) lab.Manifest {
	m := lab.Manifest{Name: name, ClusterIPs: []netip.Addr{address}, DataPlane: "kernel"}
	if in == plan.Userspace {
		m.DataPlane = "userspace"
	}
	for _, b := range r.Net.Backends {
		m.Endpoints = append(m.Endpoints, lab.ManifestEndpoint{Name: b.Name, Addresses: b.Addresses, Weight: 1})
	}
	return m
}

// StartKProxy starts the real program on the node, with a service that has a port for
// each kind of load, and waits until that is in the data plane in.
func (r *Rig) StartKProxy(ctx context.Context, program string, in plan.DataPlane, further ...string) error {
	m := r.Manifest("load", ServiceAddress, in)
	sessions := r.Manifest("sessions", ServiceAddress, in).Annotate("kproxy.dev/udp-responses", "1") // as nginx is told
	for _, k := range Kinds {
		p := lab.ManifestPort{Name: string(k), Protocol: "TCP", Port: k.Port(), Target: k.Port()}
		if k.UDP() {
			p.Protocol = "UDP"
		}
		if k == Session {
			sessions.Ports = append(sessions.Ports, p)
		} else {
			m.Ports = append(m.Ports, p)
		}
	}
	if err := errors.Join(os.MkdirAll(r.Manifests(), 0o755), m.Write(r.Manifests()), sessions.Write(r.Manifests())); err != nil {
		return err
	}
	socket := filepath.Join(r.Dir, "kproxy.sock")
	r.KProxy = web.NewClient(socket)
	r.Proxy = &lab.Process{Namespace: r.Net.Node, Path: program, Args: slices.Concat([]string{
		"run", "--mode", string(in), "--manifests", r.Manifests(), "--socket", socket,
		"--state-dir", filepath.Join(r.Dir, "state"), "--hostname-override", "node",
		"--health-check", "off", // peers have none, and probes would be noise
	}, further)}
	if err := r.Proxy.Start(); err != nil {
		return err
	}
	return r.AwaitProgrammed(ctx, in)
}

// AwaitProgrammed waits until kproxy, which has just been started, has its service in
// the data plane in.
func (r *Rig) AwaitProgrammed(ctx context.Context, in plan.DataPlane) error {
	ctx, cancel := context.WithTimeout(ctx, r.Within(20*time.Second))
	defer cancel()
	return r.Proxy.WaitReady(ctx, func() error { return r.Programmed(ctx, in, 0) })
}

// Programmed says what is missing until n further services are in the data plane in; nil for nothing.
func (r *Rig) Programmed(ctx context.Context, in plan.DataPlane, n int) error {
	st, err := r.KProxy.Status(ctx)
	if err != nil {
		return err
	}
	if !st.Alive || st.Sync.LastError != "" {
		return fmt.Errorf("kproxy isn't alive yet (%s)", st.Sync.LastError)
	}
	for i := range st.Services {
		if s := &st.Services[i]; s.DataPlane != in {
			return fmt.Errorf("%s/%s:%s is in data plane %s: %s", s.Namespace, s.Name, s.Port, s.DataPlane, s.Reason)
		}
	}
	if want := n + len(Kinds); len(st.Services) != want {
		return fmt.Errorf("%d of %d service ports are there", len(st.Services), want)
	}
	return nil
}
