package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
)

// draining is a service in IPVS with a connection per family to b1, which is
// about to be removed.
type draining struct {
	*world
	m     lab.Manifest
	lines []*line // by family
}

func newDraining(t *testing.T, drain time.Duration) *draining {
	w := newWorld(t)
	d := &draining{world: w, m: newManifest("web", 10, w.net.Backends...)}
	w.must(d.m.Write(w.manifests))
	w.start("--drain-timeout", drain.String())
	w.pin("web", "line", service.PreferKernel)
	for _, target := range frontends(d.m) {
		d.lines = append(d.lines, w.lineTo("b1", target))
	}
	return d
}

// endpoint is that of b1 in a family.
func (d *draining) endpoint(family int) netip.AddrPort {
	return d.net.Backend("b1").Address(family == 1, lab.LinePort)
}

// awaitWeight waits until b1 has a weight in both families.
func (d *draining) awaitWeight(weight int) {
	d.Helper()
	for f, target := range frontends(d.m) {
		d.awaitReal(target, d.endpoint(f), weight)
	}
}

func (d *draining) live(what string) {
	d.Helper()
	for _, l := range d.lines {
		l.lives(what)
	}
}

func (d *draining) reset() {
	d.Helper()
	for _, l := range d.lines {
		l.reset()
	}
}

// TestIPVSDrain: an endpoint that is removed takes no new connection, and goes
// when its last one has ended.
func TestIPVSDrain(t *testing.T) {
	d := newDraining(t, within(time.Minute))
	d.must(d.m.Without("b1").Write(d.manifests))
	d.awaitWeight(0)
	d.awaitBackends(d.m, "b2", "b3")
	d.live("while its endpoint drains")
	sleep(2 * time.Second) // the drain is looked after every second
	d.live("while its endpoint drains")
	d.awaitWeight(0)
	d.reset()
	d.awaitWeight(-1)
	d.awaitBackends(d.m, "b2", "b3")
}

// TestIPVSDrainEnds: a drain ends when --drain-timeout has passed, counted from
// its begin, restarts or not.
func TestIPVSDrainEnds(t *testing.T) {
	t.Parallel()
	for _, restarts := range []bool{false, true} {
		t.Run(fmt.Sprintf("restarts %v", restarts), func(t *testing.T) {
			drain := lasting(8 * time.Second)
			d := newDraining(t, drain)
			began := time.Now()
			d.must(d.m.Without("b1").Write(d.manifests))
			d.awaitWeight(0)
			d.live("while its endpoint drains")
			if restarts {
				d.stop()
				d.live("while kproxy is down")
				d.awaitWeight(0)
				d.startAgain()
				d.live("after a restart")
			}
			d.awaitWeight(-1)
			if took := time.Since(began); took < drain-lasting(time.Second) || took > drain+within(5*time.Second) {
				t.Errorf("the drain took %s, want %s", took, drain)
			}
		})
	}
}

// TestIPVSDrainSurvivesRestarts: a kproxy that starts again goes on draining
// what an earlier one began to drain.
func TestIPVSDrainSurvivesRestarts(t *testing.T) {
	d := newDraining(t, within(time.Minute))
	d.must(d.m.Without("b1").Write(d.manifests))
	d.awaitWeight(0)
	d.must(d.proxy.Kill())
	d.live("after kill -9")
	d.startAgain()
	d.awaitWeight(0)
	d.stop()
	d.startAgain()
	d.awaitBackends(d.m, "b2", "b3")
	d.live("after two restarts")
	d.awaitWeight(0)
	d.reset()
	d.awaitWeight(-1)
}

// TestIPVSEndpointReturns: one that comes back while it drains takes new
// connections again and has lost none.
func TestIPVSEndpointReturns(t *testing.T) {
	d := newDraining(t, lasting(6*time.Second))
	d.must(d.m.Without("b1").Write(d.manifests))
	d.awaitWeight(0)
	d.must(d.m.Write(d.manifests))
	d.awaitWeight(1)
	d.awaitBackends(d.m, "b1", "b2", "b3")
	d.live("after its endpoint came back")
	sleep(8 * time.Second) // the drain would be over
	d.awaitWeight(1)
	d.live("after its endpoint came back for good")
}

// TestIPVSDeletedServiceDrains: connections of a service that is deleted live on,
// nobody new gets through to it, and with the last connection all of it goes.
func TestIPVSDeletedServiceDrains(t *testing.T) {
	d := newDraining(t, within(time.Minute))
	d.must(os.Remove(d.m.Path(d.manifests)))
	d.gone("web")
	d.awaitWeight(0)
	for _, target := range frontends(d.m) {
		d.unserved("tcp", target.String())
		d.unserved("udp", target.String())
	}
	sleep(2 * time.Second) // the drain is looked after every second
	d.live("after its service was deleted")
	d.stop()
	d.startAgain()
	d.live("after a restart")
	d.reset()
	d.eventually(20*time.Second, "all of the service to be gone", func() error {
		now := d.everything()
		for _, trace := range traces {
			if strings.Contains(now, trace) {
				return errors.New(trace + " is still in the kernel")
			}
		}
		return nil
	})
}

// TestIPVSServiceReturns: a service that is created again while it drains is
// served again and has lost no connection.
func TestIPVSServiceReturns(t *testing.T) {
	d := newDraining(t, lasting(6*time.Second))
	d.must(os.Remove(d.m.Path(d.manifests)))
	d.gone("web")
	d.awaitWeight(0)
	d.must(d.m.Write(d.manifests))
	d.awaitWeight(1)
	d.awaitBackends(d.m, "b1", "b2", "b3")
	sleep(8 * time.Second) // the drain would be over
	d.awaitWeight(1)
	d.live("after its service came back")
}
