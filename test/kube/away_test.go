package kube

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/plan"
)

// TestAPIServerAway: kproxy is restarted while there is no API server, and the
// API server is gone while kproxy runs. What was served before is served on, the
// status says what is wrong, and what has changed meanwhile holds when the API
// server is back.
func TestAPIServerAway(t *testing.T) {
	w := newWorld(t, plan.ModeIPTables)
	b := w.net.Backends
	s := w.create(newService("steady", nil), newSlices("steady", b[:3]...)...)
	other := w.create(newService("other", nil), newSlices("other", b[0])...)
	w.run()
	w.everywhere(s, "b1", "b2", "b3")
	w.everywhere(other, "b1")
	w.eventually("the service in the kernel", func() error { return w.offloaded("steady") })
	traffic := w.traffic(frontends(s)[0], 50)

	w.must(w.proxy.Stop(patience))
	w.must(w.api.Kill())
	w.start()
	w.eventually("the status to say that there is no API", func() error { return w.source(false, "refused") })
	time.Sleep(2 * time.Second) // it keeps trying, and does no harm
	if !w.proxy.Running() {
		t.Fatal("kproxy has ended, want it to keep trying")
	}
	w.everywhere(other, "b1")
	w.noneFailed("without an API server from the start on", traffic.Results())

	w.must(w.api.Start())
	w.must(w.awaitAPI(w.ctx))
	w.eventually("the source to be in order", func() error { return w.source(true, "") })
	w.point("other", b[1])
	w.everywhere(other, "b2")
	w.awaitSettled()

	before, err := w.status.Status(w.ctx)
	w.must(err)
	log := w.proxy.Log()
	w.must(w.api.Kill())
	w.eventually("the status to say that the API is gone", func() error { return w.source(true, "refused") })
	w.everywhere(other, "b2")
	w.must(w.api.Start())
	w.must(w.awaitAPI(w.ctx))
	w.eventually("the source to be in order again", func() error { return w.source(true, "") })
	after, err := w.status.Status(w.ctx)
	w.must(err)
	if diff := cmp.Diff(shown(before), shown(after)); diff != "" {
		t.Errorf("the status before (-) and after (+) the API server was away:\n%s", diff)
	}
	changes := "kind=dataplane"
	if was, is := strings.Count(log, changes), strings.Count(w.proxy.Log(), changes); was != is {
		t.Errorf("%d changes of data planes while the API server was away and came back, want none", is-was)
	}
	w.point("other", b[2])
	w.everywhere(other, "b3")
	w.noneFailed("all the time", traffic.Stop())
}

// source returns nil if the API was read or not, as synced says, and its error
// holds a text; empty means no error.
func (w *world) source(synced bool, text string) error {
	st, err := w.status.Status(w.ctx)
	if err != nil {
		return err
	}
	if len(st.Sources) == 0 {
		return errors.New("no source")
	}
	for _, s := range st.Sources {
		if s.Synced != synced || !strings.Contains(s.Error, text) || text == "" && s.Error != "" {
			return fmt.Errorf("synced %t, error %q", s.Synced, s.Error)
		}
	}
	return nil
}
