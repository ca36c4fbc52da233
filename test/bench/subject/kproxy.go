package subject

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/bench/traffic"
	"kproxy.dev/kproxy/web"
)

// kproxy starts the real program with a service that it holds in userspace.
func kproxy(masquerade bool) func(context.Context, *Rig) error {
	return func(ctx context.Context, r *Rig) error {
		manifests, socket := filepath.Join(r.dir, "manifests"), filepath.Join(r.dir, "kproxy.sock")
		if err := os.MkdirAll(manifests, 0o755); err != nil {
			return fmt.Errorf("make folder for manifests: %w", err)
		}
		if err := r.manifest().Write(manifests); err != nil {
			return err
		}
		args := []string{
			"run", "--mode", "userspace", "--manifests", manifests, "--socket", socket,
			"--state-dir", filepath.Join(r.dir, "state"), "--hostname-override", "node",
			"--health-check", "off", // nobody else has any
			"--drain-timeout", "3s", // when it is stopped, its clients have gone
		}
		if masquerade {
			args = append(args, "--masquerade-all")
		}
		r.proxy = &lab.Process{Namespace: r.net.Node, Path: r.config.KProxy, Args: args}
		r.rules, r.client = true, web.NewClient(socket)
		if err := r.proxy.Start(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		return r.proxy.WaitReady(ctx, func() error { return r.programmed(ctx) })
	}
}

// manifest describes a service with a port for each kind of load.
func (r *Rig) manifest() lab.Manifest {
	b := r.backend()
	m := lab.Manifest{
		Name: "bench", ClusterIPs: []netip.Addr{ServiceAddress}, DataPlane: "userspace",
		Endpoints: []lab.ManifestEndpoint{{Name: b.Name, Addresses: b.Addresses, Weight: 1}},
	}
	for _, k := range traffic.Kinds {
		p := lab.ManifestPort{Name: string(k), Protocol: "TCP", Port: k.Port(), Target: k.Port()}
		if k.UDP() {
			p.Protocol = "UDP"
		}
		m.Ports = append(m.Ports, p)
	}
	return m
}

// programmed says what is missing until kproxy carries all ports in userspace.
func (r *Rig) programmed(ctx context.Context) error {
	st, err := r.client.Status(ctx)
	if err != nil {
		return err
	}
	if !st.Alive || st.Sync.LastError != "" {
		return fmt.Errorf("kproxy isn't alive yet (%s)", st.Sync.LastError)
	}
	for i := range st.Services {
		if s := &st.Services[i]; s.DataPlane != plan.Userspace {
			return fmt.Errorf("port %s is in data plane %s: %s", s.Port, s.DataPlane, s.Reason)
		}
	}
	if len(st.Services) != len(traffic.Kinds) {
		return fmt.Errorf("%d of %d service ports are there", len(st.Services), len(traffic.Kinds))
	}
	return nil
}
