package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestRollingUpdate replaces every endpoint of running services, one after another,
// as a Deployment does: a new one becomes ready, an old one terminates while it still
// serves, then doesn't serve any more, ends when its clients have gone, and is
// removed. Meanwhile new connections, connections that last, keep-alive HTTP and
// UDP go on, and no request fails; in every mode, wherever the service is carried,
// and for traffic policy Local as well.
func TestRollingUpdate(t *testing.T) {
	t.Parallel()
	for _, mode := range flowModes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRollout(t, mode)
			loads := r.load()
			for i, old := range r.old {
				r.replace(old, r.young[i])
			}
			// And back: the next generation may get the addresses of one before. (A slow
			// machine would need minutes for it.)
			for i, old := range r.young {
				if slow == 1 {
					r.replace(old, r.old[i])
				}
			}
			for _, l := range loads {
				l()
			}
		})
	}
}

// rollout is a world whose services are rolled out.
type rollout struct {
	*world
	services   []lab.Manifest
	old, young []*lab.Backend
	web        map[string]*http.Server // by backend
}

const rolloutHTTP uint16 = 8081 // of servers that end as they should

func newRollout(t *testing.T, mode plan.Mode) *rollout {
	t.Helper()
	r := &rollout{world: buildWorld(t, func(c *lab.Config) { c.Backends = 6 }), web: map[string]*http.Server{}}
	r.old, r.young = r.net.Backends[:3], r.net.Backends[3:]
	for _, b := range r.old {
		r.startWeb(b)
	}
	preferences := []service.Preference{service.PreferAuto, service.PreferUserspace, service.PreferKernel, service.PreferAuto}
	for i, name := range []string{"auto", "user", "kernel", "local"} {
		if mode == plan.ModeUserspace && preferences[i] == service.PreferKernel {
			continue
		}
		m := newManifest(name, 10+i, r.old...)
		m.DataPlane, m.Type, m.ExternalLocal = string(preferences[i]), "NodePort", name == "local"
		for p := range m.Ports {
			m.Ports[p].NodePort = uint16(30000 + 10*i + p)
		}
		m.Ports[2].Target = rolloutHTTP
		r.must(m.Write(r.manifests))
		r.services = append(r.services, m)
	}
	r.start("--mode", string(mode), "--health-check", "off")
	return r
}

// target returns where clients ask for port p of a service: at its own address, or,
// where its external policy is Local, at the node's.
func (r *rollout) target(m lab.Manifest, family, p int) netip.AddrPort {
	if m.ExternalLocal {
		return netip.AddrPortFrom(r.net.Config.NodeAddresses()[family], m.Ports[p].NodePort)
	}
	return netip.AddrPortFrom(m.ClusterIPs[family], m.Ports[p].Port)
}

// replace rolls one endpoint.
func (r *rollout) replace(old, young *lab.Backend) {
	r.Helper()
	r.must(young.Start(r.ctx))
	r.startWeb(young)
	for i, m := range r.services {
		m.Endpoints = append(slices.Clone(m.Endpoints), lab.ManifestEndpoint{Name: young.Name, Addresses: young.Addresses, Weight: 1})
		r.services[i] = m
	}
	r.roll(young, func(*lab.ManifestEndpoint) {})
	sleep(200 * time.Millisecond)
	r.roll(old, func(e *lab.ManifestEndpoint) { e.NotReady, e.Terminating = true, true })
	r.web[old.Name].SetKeepAlivesEnabled(false) // as it does when it is told to end
	r.must(r.web[old.Name].Shutdown(r.ctx))
	r.eventually(20*time.Second, old.Name+" to have no connections", func() error {
		if n := old.Active(); n > 0 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	r.roll(old, func(e *lab.ManifestEndpoint) { e.NotServing = true })
	r.eventually(20*time.Second, old.Name+" to have no clients of UDP", func() error {
		rows, err := r.client.Connections(r.ctx, "")
		for _, c := range rows {
			if c.Protocol == "udp" && slices.Contains(old.Addresses, c.Endpoint.Addr()) {
				return fmt.Errorf("%s has %s", c.Service, c.Client)
			}
		}
		return err
	})
	time.Sleep(patience(300 * time.Millisecond)) // what it has received it still answers
	old.Stop()
	for i := range r.services {
		r.services[i] = r.services[i].Without(old.Name)
	}
	r.roll(old, nil)
}

// roll writes the manifests, with one endpoint as change makes it (nil: without it),
// and waits until kproxy serves accordingly.
func (r *rollout) roll(b *lab.Backend, change func(*lab.ManifestEndpoint)) {
	r.Helper()
	want := map[string]lab.ManifestEndpoint{}
	for i := range r.services {
		if change != nil {
			r.services[i] = r.services[i].Edit(b.Name, change)
		}
		r.must(r.services[i].Write(r.manifests))
		for _, e := range r.services[i].Endpoints {
			want[e.Name] = e
		}
	}
	e, exists := want[b.Name]
	r.eventually(15*time.Second, b.Name+" to count", func() error {
		st, err := r.client.Status(r.ctx)
		if err != nil {
			return err
		}
		for _, s := range st.Services {
			found := 0
			for _, row := range s.Endpoints {
				if slices.Contains(b.Addresses, row.Address.Addr()) && row.Ready == !e.NotReady && row.Serving == !e.NotServing && row.Terminating == e.Terminating {
					found++
				}
			}
			if exists && found != len(b.Addresses) || !exists && found > 0 {
				return fmt.Errorf("%s:%s doesn't know yet: %+v", s.Name, s.Port, s.Endpoints)
			}
		}
		return nil
	})
}

// startWeb starts an HTTP server that can end without breaking a request.
func (r *rollout) startWeb(b *lab.Backend) {
	r.Helper()
	l, err := b.Namespace.Listen(r.ctx, "tcp", fmt.Sprintf(":%d", rolloutHTTP))
	r.must(err)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, b.Name) })}
	r.web[b.Name] = s
	go func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			r.Errorf("HTTP server of %s: %v", b.Name, err)
		}
	}()
	r.Cleanup(func() { s.Close() })
}
