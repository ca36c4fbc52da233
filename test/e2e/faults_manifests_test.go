package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// sourceError returns the errors that the status reports for the manifests.
func (w *world) sourceError() string {
	w.Helper()
	st, err := w.client.Status(w.ctx)
	w.must(err)
	var all []string
	for _, s := range st.Sources {
		all = append(all, s.Error)
	}
	return strings.Join(all, "\n")
}

// awaitSourceError waits until the status says all phrases about the
// manifests, or nothing if there are none.
func (w *world) awaitSourceError(phrases ...string) {
	w.Helper()
	w.eventually(10*time.Second, fmt.Sprintf("the status to say %q", phrases), func() error {
		got := w.sourceError()
		if len(phrases) == 0 && got != "" {
			return fmt.Errorf("it says %q", got)
		}
		for _, p := range phrases {
			if !strings.Contains(got, p) {
				return fmt.Errorf("it says %q", got)
			}
		}
		return nil
	})
}

// awaitBackends waits until new connections reach exactly these backends: as
// many in a row as there would be others in a round.
func (w *world) awaitBackends(m lab.Manifest, want ...string) {
	w.Helper()
	for _, target := range frontends(m) {
		w.eventually(10*time.Second, fmt.Sprintf("%s to be served by %v", target, want), func() error {
			seen := map[string]bool{}
			for range 6 {
				ctx, cancel := context.WithTimeout(w.ctx, within(2*time.Second))
				a, err := w.net.Client.Ask(ctx, "tcp", target, "hello")
				cancel()
				if err != nil {
					return err
				}
				seen[a.Backend] = true
			}
			for _, b := range want {
				if !seen[b] {
					return fmt.Errorf("it is served by %v", seen)
				}
			}
			if len(seen) != len(want) {
				return fmt.Errorf("it is served by %v", seen)
			}
			return nil
		})
	}
}

// TestMalformedManifest: a file that stops being valid keeps its last valid
// content in force; status, log, check and a metric say where it is wrong; and
// when it is valid again, it counts.
func TestMalformedManifest(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	good := m.YAML()
	unknown := strings.Replace(good, "  ports:\n", "  prots: 80\n  ports:\n", 1)
	mistyped := strings.Replace(good, "port: 80\n", "port: eighty\n", 1)
	for _, c := range []struct{ name, text, line string }{
		{"unknown field", unknown, "prots: 80"},
		{"wrong type", mistyped, "port: eighty"},
		{"not YAML", good + "\n---\nkind: [", "kind: ["},
	} {
		t.Run(c.name, func(t *testing.T) {
			at := fmt.Sprintf("%s:%d: ", m.Path(w.manifests), lineOf(c.text, c.line))
			write(t, m.Path(w.manifests), c.text)
			w.awaitSourceError(at)
			w.kproxy("status").wants(t, 0, at)
			w.kproxy("check", "--manifests", w.manifests).wants(t, 2, at)
			if !strings.Contains(w.proxy.Log(), at) {
				t.Errorf("the log doesn't say %q", at)
			}
			if _, metrics := w.get("http://127.0.0.1:10249/metrics"); !strings.Contains(metrics, `kproxy_source_errors{source="`+w.manifests+`"} 1`) {
				t.Error("no metric counts the problem")
			}
			w.awaitBackends(m, "b1", "b2", "b3")
			// Other files are read on.
			other := newManifest("other", 11, w.net.Backends[0])
			w.must(other.Write(w.manifests))
			w.await("other", "line", plan.Userspace, "")
			w.awaitBackends(other, "b1")
			w.must(os.Remove(other.Path(w.manifests)))

			write(t, m.Path(w.manifests), m.Without("b1").YAML())
			w.awaitSourceError()
			w.awaitBackends(m, "b2", "b3")
			write(t, m.Path(w.manifests), good)
			w.awaitBackends(m, "b1", "b2", "b3")
		})
	}
}

// lineOf is the number of the first line that holds s.
func lineOf(text, s string) int {
	return 1 + strings.Count(text[:strings.Index(text, s)], "\n")
}

// TestBrokenFromTheStart: kproxy starts with what is valid, and says what isn't.
func TestBrokenFromTheStart(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	broken := newManifest("broken", 11)
	write(t, broken.Path(w.manifests), "kind: [\n")
	w.start()
	w.awaitSourceError(broken.Path(w.manifests) + ":1: ")
	w.awaitBackends(m, "b1", "b2", "b3")
}

// TestDuplicateDefinition: of two definitions of one Service, the first counts
// and the status says where the other is; when the first goes, the other counts.
func TestDuplicateDefinition(t *testing.T) {
	w := newWorld(t)
	first := newManifest("web", 10, w.net.Backends[0])
	second := newManifest("web", 10, w.net.Backends[1])
	w.must(first.Write(w.manifests))
	w.start()
	w.awaitBackends(first, "b1")
	again := w.manifests + "/z-again.yaml"
	write(t, again, second.YAML())
	w.awaitSourceError(again+":1: ", "default/web", first.Path(w.manifests))
	w.awaitBackends(first, "b1")
	w.kproxy("check", "--manifests", w.manifests).wants(t, 2, again+":1: ", "default/web")
	w.must(os.Remove(first.Path(w.manifests)))
	w.awaitSourceError()
	w.awaitBackends(first, "b2")
}

// TestTwoServicesOnOneAddress: the older has it, in every data plane, whichever
// came first; the other says so, and gets it when the older goes.
func TestTwoServicesOnOneAddress(t *testing.T) {
	t.Parallel()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		t.Run(string(plane), func(t *testing.T) {
			w := newWorld(t)
			young := newManifest("young", 10, w.net.Backends[0])
			old := newManifest("old", 10, w.net.Backends[1])
			young.Created = time.Date(2026, 2, 1, 0, 0, 0, 0, time.UTC)
			old.Created = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
			young.DataPlane, old.DataPlane = string(plane), string(plane)
			w.must(young.Write(w.manifests))
			w.start()
			w.awaitBackends(young, "b1")
			w.must(old.Write(w.manifests))
			w.awaitBackends(old, "b2")
			s := w.service("young", "line")
			if problems := strings.Join(s.Problems, "\n"); !strings.Contains(problems, "10.96.0.10:80") || !strings.Contains(problems, "default/old:line, which is older") {
				t.Errorf("the younger says %q about its address", problems)
			}
			if s.DataPlane != plan.None || !strings.Contains(s.Reason, "belong to other services") {
				t.Errorf("the younger is in %s: %s; want none", s.DataPlane, s.Reason)
			}
			if s := w.service("old", "line"); len(s.Problems) != 0 {
				t.Errorf("the older says %q", s.Problems)
			}
			w.must(os.Remove(old.Path(w.manifests)))
			w.awaitBackends(young, "b1")
		})
	}
}

// TestWrongAnnotation: a value that isn't allowed is as good as none; status
// and check say so.
func TestWrongAnnotation(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Algorithm, m.DataPlane = "fastest", "hardware"
	m = m.Annotate("kproxy.dev/retries", "many")
	w.must(m.Write(w.manifests))
	w.start()
	s := w.service("web", "line")
	for _, want := range []string{`kproxy.dev/algorithm: "fastest"`, `kproxy.dev/dataplane: "hardware"`, `kproxy.dev/retries: "many"`} {
		if !strings.Contains(strings.Join(s.Problems, "\n"), want) {
			t.Errorf("the status doesn't complain of %s: %q", want, s.Problems)
		}
		w.kproxy("status").wants(t, 0, want)
		w.kproxy("check", "--manifests", w.manifests).wants(t, 2, m.Path(w.manifests)+":", want)
	}
	if s.Algorithm != string(service.RoundRobin) {
		t.Errorf("it is balanced by %s, want the default", s.Algorithm)
	}
	w.awaitBackends(m, "b1", "b2", "b3")
	w.await("web", "line", w.plane, plan.StateOffloaded)
	m.Algorithm, m.DataPlane, m.Extra = "", "", nil
	w.must(m.Write(w.manifests))
	w.eventually(10*time.Second, "the complaints to go", func() error {
		if p := w.service("web", "line").Problems; len(p) > 0 {
			return fmt.Errorf("it says %q", p)
		}
		return nil
	})
}

// TestDirectoryComesBack: a directory that is deleted takes its services along,
// and one that is created again brings them back, however often.
func TestDirectoryComesBack(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.awaitBackends(m, "b1", "b2", "b3")
	for _, left := range [][]string{{"b2", "b3"}, {"b1", "b3"}} {
		w.must(os.RemoveAll(w.manifests))
		w.awaitSourceError(w.manifests)
		w.gone("web")
		w.must(os.Mkdir(w.manifests, 0o755))
		now := newManifest("web", 10, w.net.Backend(left[0]), w.net.Backend(left[1]))
		w.must(now.Write(w.manifests))
		w.awaitSourceError()
		w.awaitBackends(now, left...)
	}
}

// gone waits until a service isn't in the status.
func (w *world) gone(name string) {
	w.Helper()
	w.eventually(10*time.Second, "service "+name+" to be gone", func() error {
		st, err := w.client.Status(w.ctx)
		for _, s := range st.Services {
			if s.Name == name {
				return fmt.Errorf("%s is there, in %s", s.Port, s.DataPlane)
			}
		}
		return err
	})
}

// traces are what default/web leaves in the kernel.
var traces = []string{"default/web", "10.96.0.10/", "10.96.0.10,", "10.96.0.10:", "fd00:96::a/", "fd00:96::a,", "[fd00:96::a]:"}

// TestDeletedService: nobody gets through to it any more and nothing of it is
// left in the kernel, but for what connections in IPVS need; connections that
// exist live on, in both data planes.
func TestDeletedService(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.must(newManifest("other", 11, w.net.Backends...).Write(w.manifests))
	w.start("--drain-timeout", within(time.Minute).String())
	var held []*lab.Held
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for _, target := range frontends(m) {
			held = append(held, w.hold(target))
		}
	}
	w.must(os.Remove(m.Path(w.manifests)))
	w.gone("web")
	for _, target := range frontends(m) {
		for _, network := range []string{"tcp", "udp"} {
			w.eventually(8*time.Second, "nobody to serve it", func() error { return w.nobodyAt(network, target.String()) })
		}
	}
	w.eventually(8*time.Second, "its rules to be gone", func() error {
		if w.plane == plan.IPVS {
			return nil // it drains, which has tests of its own
		}
		now := w.everything()
		for _, trace := range traces {
			if strings.Contains(now, trace) {
				return fmt.Errorf("%s is still in the kernel", trace)
			}
		}
		return nil
	})
	exchanges := held[0].Exchanges()
	w.eventually(5*time.Second, "the held connections to go on", func() error {
		if now := held[0].Exchanges(); now < exchanges+5 {
			return fmt.Errorf("%d exchanges since", now-exchanges)
		}
		return nil
	})
	w.unbroken("after their service was deleted", held...)
	w.awaitBackends(newManifest("other", 11, w.net.Backends...), "b1", "b2", "b3")
}

// unserved checks that nobody answers at an address that belongs to nothing:
// whether that is told or not depends on where the address is routed.
func (w *world) unserved(network, target string) {
	w.Helper()
	if err := w.nobodyAt(network, target); err != nil {
		w.Error(err)
	}
}

// nobodyAt is an error when somebody answers there.
func (w *world) nobodyAt(network, target string) error {
	ctx, cancel := context.WithTimeout(w.ctx, lasting(time.Second))
	defer cancel()
	c, err := w.net.Client.Dial(ctx, network, target)
	if err != nil {
		return nil
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(lasting(time.Second))); err != nil {
		return err
	}
	if _, err := c.Write([]byte("hello\n")); err != nil {
		return nil
	}
	if n, err := c.Read(make([]byte, 100)); err == nil {
		return fmt.Errorf("%s to %s: answered with %d bytes, want nobody to serve it", network, target, n)
	}
	return nil
}
