package compare

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare/load"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

// rig is the network of one plane.
type rig struct {
	config   *Config
	plane    Plane
	net      *lab.Network
	dir      string
	server   *lab.Process
	proxy    *lab.Process // nil for Direct
	client   *web.Client
	table    *conntrack.Client
	nextPort uint16 // of UDP sessions
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

func newRig(c *Config, p Plane) *rig {
	cfg := lab.DefaultConfig()
	cfg.Prefix, cfg.Backends, cfg.IPv6 = rigPrefix(c.Prefix, p), backends, false
	return &rig{config: c, plane: p, net: lab.New(cfg), dir: rigDir(c.Prefix, p), nextPort: firstSessionPort}
}

func rigPrefix(prefix string, p Plane) string { return prefix + "-" + string(p) }

// rigDir is short: the path of a socket ends at 107 bytes (unix(7)).
func rigDir(prefix string, p Plane) string { return filepath.Join("/run", rigPrefix(prefix, p)) }

// Down removes what a comparison with this prefix left behind.
func Down(prefix string) error {
	var errs []error
	for _, p := range Planes {
		errs = append(errs, lab.DownAll(rigPrefix(prefix, p)), os.RemoveAll(rigDir(prefix, p)))
	}
	return errors.Join(errs...)
}

// up builds the network and starts server and proxy. When it fails, nothing is
// left; an *unavailable says that this host can't have the plane.
func (r *rig) up(ctx context.Context) error {
	if err := r.net.Up(ctx); err != nil {
		return err
	}
	err := r.start(ctx)
	if err != nil {
		err = errors.Join(err, r.down())
	}
	return err
}

func (r *rig) start(ctx context.Context) error {
	if err := errors.Join(os.RemoveAll(r.dir), os.MkdirAll(r.manifests(), 0o755)); err != nil {
		return err
	}
	if err := r.startServer(ctx); err != nil {
		return err
	}
	if r.plane != Direct {
		if err := r.startProxy(ctx); err != nil {
			return err
		}
	}
	return r.net.Node.Do(func() (err error) {
		r.table, err = conntrack.Dial()
		return err
	})
}

func (r *rig) manifests() string { return filepath.Join(r.dir, "manifests") }

// environment of load and server: no signal interrupts a thread that computes,
// so that none interrupts a system call (runtime, "asyncpreemptoff").
var environment = []string{"GODEBUG=asyncpreemptoff=1"}

func (r *rig) startServer(ctx context.Context) error {
	var s load.Server
	for _, b := range r.net.Backends {
		s.Namespaces = append(s.Namespaces, b.Namespace.Name)
	}
	arg, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode server: %w", err)
	}
	r.server = &lab.Process{Namespace: r.net.Backends[0].Namespace, Path: r.config.Program, Args: []string{"lab", "compare-serve", string(arg)}, Env: environment}
	if err := r.server.Start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, r.config.within(10*time.Second))
	defer cancel()
	return r.server.WaitReady(ctx, func() error {
		if strings.Contains(r.server.Log(), ServerReady) {
			return nil
		}
		return errors.New("the server isn't ready yet")
	})
}

// ServerReady is what the server prints when it listens.
const ServerReady = "ready"

func (r *rig) startProxy(ctx context.Context) error {
	if err := loadManifest(r.plane, r.net.Backends).Write(r.manifests()); err != nil {
		return err
	}
	socket := filepath.Join(r.dir, "kproxy.sock")
	r.client = web.NewClient(socket)
	r.proxy = &lab.Process{
		Namespace: r.net.Node, Path: r.config.Program,
		Args: []string{
			"run", "--mode", string(r.plane), "--manifests", r.manifests(), "--socket", socket,
			"--state-dir", filepath.Join(r.dir, "state"), "--hostname-override", "node",
			// Probes would be noise, and all of the services have the same endpoints.
			"--health-check", "off", "--alive-timeout", min(r.config.within(5*time.Second), 30*time.Second).String(),
		},
	}
	if err := r.proxy.Start(); err != nil {
		return err
	}
	ready, cancel := context.WithTimeout(ctx, r.config.within(20*time.Second))
	defer cancel()
	err := r.proxy.WaitReady(ready, func() error {
		st, err := r.client.Status(ready)
		if err != nil {
			return err
		}
		r.iptables = capability(st, "iptables")
		return r.programmed(st, 0)
	})
	var exit *exec.ExitError
	if err != nil && !r.proxy.Running() && errors.As(r.proxy.Wait(ctx), &exit) && exit.ExitCode() == exitHost {
		return &unavailable{lastLine(r.proxy.Log())}
	}
	return err
}

func capability(st plan.Status, name string) string {
	for _, c := range st.Capabilities {
		if c.Name == name {
			return c.Reason
		}
	}
	return ""
}

// lastLine is what a program said before it ended, without its own name, nor
// the advice to choose another mode.
func lastLine(log string) string {
	lines := strings.Split(strings.TrimSpace(log), "\n")
	line, _, _ := strings.Cut(lines[len(lines)-1], ": get it, or choose")
	return strings.TrimPrefix(line, "kproxy: ")
}

// programmed says what is missing until n services and the one for loads are
// where they belong.
func (r *rig) programmed(st plan.Status, n int) error {
	if !st.Alive || st.Sync.LastError != "" {
		return fmt.Errorf("kproxy isn't alive yet (%s)", st.Sync.LastError)
	}
	there := 0
	for i := range st.Services {
		s := &st.Services[i]
		if s.DataPlane != plan.DataPlane(r.plane) {
			return fmt.Errorf("%s/%s:%s is in data plane %s: %s", s.Namespace, s.Name, s.Port, s.DataPlane, s.Reason)
		}
		there++
	}
	if want := n + len(loadManifest(r.plane, nil).Ports); there != want {
		return fmt.Errorf("%d of %d service ports are there", there, want)
	}
	return nil
}

// down takes it down, also when it is half up.
func (r *rig) down() error {
	var errs []error
	if r.table != nil {
		errs = append(errs, r.table.Close())
	}
	for _, p := range []*lab.Process{r.proxy, r.server} {
		if p != nil && p.Running() {
			errs = append(errs, p.Kill())
		}
	}
	return errors.Join(append(errs, r.net.Down(), os.RemoveAll(r.dir))...)
}

// targets are where a load of the kind goes: to the service, or to the backends
// themselves. first is the filler for first packets.
func (r *rig) targets(k load.Kind, first netip.Addr) []netip.AddrPort {
	switch {
	case r.plane == Direct:
		var out []netip.AddrPort
		for _, b := range r.net.Backends {
			out = append(out, b.Address(false, k.Port()))
		}
		return out
	case k == load.Firsts:
		return []netip.AddrPort{netip.AddrPortFrom(first, fillerPort)}
	}
	return []netip.AddrPort{netip.AddrPortFrom(loadService, k.Port())}
}
