package ipvs

import (
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

// TestSchedulersAreTriedOnce: each is tried when somebody first asks for it, one
// that fails again a minute later, and what was handed out doesn't change.
func TestSchedulersAreTriedOnce(t *testing.T) {
	var tried []string
	missing := errors.New("no module ip_vs_nope")
	s := schedulerProbes{log: slog.New(slog.DiscardHandler), always: []string{"rr", "mh"}, try: func(name string) error {
		tried = append(tried, name)
		if name == "nope" {
			return missing
		}
		return nil
	}}
	snapshot := func(names ...string) *service.Snapshot {
		var b service.Builder
		for i, name := range names {
			if err := b.AddPort(service.Port{Key: service.Key{Namespace: "d", Name: string(rune('a' + i)), Protocol: service.TCP}, Scheduler: name}); err != nil {
				t.Fatal(err)
			}
		}
		return b.Build()
	}
	now := time.Unix(0, 0)
	look := func(what string, of *service.Snapshot, want map[string]string, wantTried ...string) {
		t.Helper()
		tried = nil
		got := s.of(of, now)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		if !slices.Equal(tried, wantTried) {
			t.Errorf("%s: tried %v, want %v", what, tried, wantTried)
		}
	}
	none, some := snapshot("", ""), snapshot("nope", "", "sed", "sed")
	look("nobody asks", none, map[string]string{"rr": "", "mh": ""}, "rr", "mh")
	before := s.known
	known := map[string]string{"rr": "", "mh": "", "nope": missing.Error(), "sed": ""}
	look("two are asked for", some, known, "nope", "sed")
	look("again", some, known)
	now = now.Add(retryScheduler)
	look("a minute later", some, known, "nope")
	missing = nil
	now = now.Add(retryScheduler)
	known["nope"] = ""
	s.try = func(name string) error { tried = append(tried, name); return nil }
	look("the module was installed", some, known, "nope")
	now = now.Add(retryScheduler)
	look("a minute after that", some, known)
	if len(before) != 2 {
		t.Errorf("what a plan was given is now %v", before)
	}
}

// TestSchedulersWithoutIPVS: nothing is tried and everything is left open.
func TestSchedulersWithoutIPVS(t *testing.T) {
	if got := (&schedulerProbes{always: []string{"rr"}}).of(&service.Snapshot{}, time.Now()); got != nil {
		t.Errorf("known of schedulers without IPVS: %v", got)
	}
}
