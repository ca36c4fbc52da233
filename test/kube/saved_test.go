package kube

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// TestServedFromDisk: a node boots while there is no API server. kproxy serves what it had saved, says
// so, and goes over to what the API says when that is back: a Service that was deleted
// meanwhile goes, and a connection through one that wasn't stays.
func TestServedFromDisk(t *testing.T) {
	w := newWorld(t, plan.ModeIPTables)
	b := w.net.Backends
	s := w.create(newService("kept", nil), newSlices("kept", b[:2]...)...)
	gone := w.create(newService("gone", nil), newSlices("gone", b[2])...)
	w.run()
	w.everywhere(s, "b1", "b2")
	w.everywhere(gone, "b3")
	w.eventually("a saved state", func() error { _, err := os.Stat(w.File("state/api-state.zip")); return err })

	w.must(w.proxy.Stop(patience))
	w.node(binary, "cleanup", "--state-dir", w.File("none")) // what is in the kernel doesn't survive a boot
	w.silent(frontends(s)[0])
	w.deleteService("gone")
	w.must(w.API.Kill())
	began := time.Now()
	w.start()
	w.eventually("the saved state to be served", func() error { return w.savedState(true) })
	w.Logf("served %s after the start", time.Since(began).Round(10*time.Millisecond))
	w.everywhere(s, "b1", "b2")
	w.everywhere(gone, "b3")
	held, err := lab.Hold(w.ctx, lab.HoldConfig{From: w.net.Client, Network: "tcp", Target: frontends(s)[0], Timeout: patience})
	w.must(err)

	w.must(w.API.Start())
	w.must(w.Await(w.ctx))
	w.eventually("what the API says to be served", func() error { return w.savedState(false) })
	w.nowhere(gone)
	w.point("kept", b[0], b[1], b[3])
	w.everywhere(s, "b4")
	if err := held.Close(); err != nil {
		w.Errorf("a connection didn't survive that the API is back: %v", err)
	}
}

// savedState returns nil if all is ready, and a saved state is served or not.
func (w *world) savedState(want bool) error {
	st, err := w.status.Status(w.ctx)
	if err != nil {
		return err
	}
	if !st.Ready {
		return errors.New(st.NotReady)
	}
	if from := st.Sources[0]; from.Synced == want || from.Saved.IsZero() == want {
		return fmt.Errorf("the source is %+v", from)
	}
	return nil
}
