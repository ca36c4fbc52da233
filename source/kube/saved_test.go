package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
	"kproxy.dev/kproxy/source"
)

// saving is the configuration of a Source of a that saves its state to a file.
func saving(a *api, file string) Config {
	return Config{Master: "http://" + a.address, Node: node, QPS: -1, StateFile: file, StateMaxAge: time.Hour,
		WriteFile: func(path string, content []byte) error { return os.WriteFile(path, content, 0o600) }}
}

// run runs a Source until stop is called or the test ends.
func run(t *testing.T, cfg Config, change ...func(*Source)) (s *Source, stop func()) {
	t.Helper()
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx); close(ended) }()
	stop = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(stop)
	return s, stop
}

// saved returns a file with the state of a world whose API server is gone.
func saved(t *testing.T) (*api, string) {
	a := world(t)
	a.start()
	file := filepath.Join(t.TempDir(), "state.zip")
	s, stop := run(t, saving(a, file))
	waitFor(t, "a saved state", func() bool { _, err := os.Stat(file); return err == nil && agrees(s, a) })
	stop() // it may be writing
	a.stop()
	return a, file
}

func TestServedFromDisk(t *testing.T) {
	a, file := saved(t)
	want := a.fromScratch()
	s, _ := run(t, saving(a, file))
	waitFor(t, "the saved state", func() bool { return s.Latest() != nil })
	if s.Latest().Hash() != want.Hash() {
		t.Errorf("%d service ports, not those that were saved", s.Latest().Len())
	}
	waitFor(t, "every watch fails", func() bool { return len(problems(s)) == 4 })
	st := s.Status()[0]
	if st.Synced || st.Saved.IsZero() || time.Since(st.Saved) > time.Hour || !strings.HasPrefix(st.Errors[0], "the API hasn't been heard since the start; served is its state as saved at 2") {
		t.Errorf("status %+v, want that it is the saved state", st)
	}
	if n := s.Latest().Node(); n.Zone != "zone-a" || !s.NodeEligible() {
		t.Errorf("this node is %+v, eligible: %v", n, s.NodeEligible())
	}
	before := s.Latest()
	a.remove("services", name3("api"))
	a.set("services", aService("new", 3))
	a.set("endpointslices", aSlice("web-1", "web", 1, 9))
	a.start()
	var last *service.Snapshot
	waitFor(t, "what the API says now", func() bool {
		if l := s.Latest(); l != before && l != last { // at once, and whole
			if last = l; l.Hash() != a.fromScratch().Hash() {
				t.Errorf("%d service ports in between, neither as saved nor as they are", l.Len())
			}
		}
		return agrees(s, a) && s.Status()[0].Synced
	})
	waitFor(t, "no problem", func() bool { return len(problems(s)) == 0 })
	if diff := cmp.Diff([]source.Status{{Name: "http://" + a.address, Synced: true}}, s.Status()); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	a.set("endpointslices", aSlice("web-2", "web", 11))
	waitFor(t, "the watches are in use", func() bool { return agrees(s, a) })
}

// An API that says what was saved changes nothing but that.
func TestBackUnchanged(t *testing.T) {
	a, file := saved(t)
	s, _ := run(t, saving(a, file))
	waitFor(t, "the saved state", func() bool { return s.Latest() != nil })
	before := s.Latest()
	<-s.Snapshots()
	a.start()
	waitFor(t, "the API to be heard", func() bool { return s.Status()[0].Synced })
	select {
	case <-s.Snapshots():
		t.Error("a signal, although nothing has changed")
	default:
	}
	if s.Latest() != before {
		t.Error("another Snapshot, although nothing has changed")
	}
}

// What an earlier release kept less of is taken from the API, although the
// object's version is the one that was saved.
func TestSavedByAnEarlierRelease(t *testing.T) {
	a, file := saved(t)
	less := newState(Config{Node: node})
	for _, o := range a.objects["services"] {
		svc := o.(*corev1.Service).DeepCopy()
		svc.Spec.Ports[0].Port = 81
		if err := less.services.Update(svc); err != nil {
			t.Fatal(err)
		}
	}
	s, _ := Open(saving(a, file))
	content, err := less.archive(s.origin())
	if err != nil || os.WriteFile(file, content, 0o600) != nil {
		t.Fatal(err)
	}
	s, _ = run(t, saving(a, file))
	waitFor(t, "the saved state", func() bool { return s.Latest() != nil })
	a.start()
	waitFor(t, "what the API says", func() bool { return agrees(s, a) })
}

func TestUnusable(t *testing.T) {
	for name, row := range map[string]struct {
		damage func(content []byte, from origin, o *state) []byte // nil deletes the file
		reason string
	}{
		"none":          {func([]byte, origin, *state) []byte { return nil }, "there is none in "},
		"empty":         {func([]byte, origin, *state) []byte { return []byte{} }, "it is damaged: "},
		"truncated":     {func(c []byte, _ origin, _ *state) []byte { return c[:len(c)/2] }, "it is damaged: "},
		"another file":  {func([]byte, origin, *state) []byte { return []byte("[]\n") }, "it is damaged: "},
		"bits":          {func(c []byte, _ origin, _ *state) []byte { c[len(c)/4] ^= 8; return c }, "it is damaged: "},
		"old":           {changed(func(o *origin) { o.Time = o.Time.Add(-90 * time.Minute) }), "it is 1h30m0s old, and --state-max-age is 1h0m0s"},
		"of the future": {changed(func(o *origin) { o.Time = o.Time.Add(90 * time.Minute) }), "which this node's clock takes to be in 1h30m0s"},
		"server":        {changed(func(o *origin) { o.Server = "https://192.0.2.1:6443" }), "it is of the API server https://192.0.2.1:6443, not of http://127.0.0.1:"},
		"cluster":       {changed(func(o *origin) { o.Authority = "00ff" }), "it is of a cluster with another certificate authority"},
		"node":          {changed(func(o *origin) { o.Node = "node-2" }), "it is of the node node-2, not of node-1"},
	} {
		t.Run(name, func(t *testing.T) {
			a, file := saved(t)
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			other, err := Open(saving(a, file))
			if err != nil {
				t.Fatal(err)
			}
			if content = row.damage(content, other.origin(), other.state); content == nil {
				err = os.Remove(file)
			} else {
				err = os.WriteFile(file, content, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			s, _ := run(t, saving(a, file))
			waitFor(t, "the reason", func() bool {
				return strings.Contains(strings.Join(problems(s), "\n"), "no saved state is served meanwhile: ") && strings.Contains(strings.Join(problems(s), "\n"), row.reason)
			})
			if st := s.Status()[0]; s.Latest() != nil || st.Synced || !st.Saved.IsZero() {
				t.Errorf("it is served all the same: %+v", st)
			}
			a.start()
			waitFor(t, "the API", func() bool { return agrees(s, a) && len(problems(s)) == 0 })
		})
	}
}

func changed(by func(*origin)) func([]byte, origin, *state) []byte {
	return func(_ []byte, from origin, o *state) []byte {
		by(&from)
		content, _ := o.archive(from)
		return content
	}
}

// One byte that is another, and a file that ends early, are found, or change nothing.
func TestDamagedAnywhere(t *testing.T) {
	_, file := saved(t)
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	from, objects, err := readArchive(content)
	if err != nil {
		t.Fatal(err)
	}
	for i := range content {
		if _, _, err := readArchive(content[:i]); err == nil {
			t.Errorf("the first %d of %d bytes are taken for a whole file", i, len(content))
		}
		bad := bytes.Clone(content)
		bad[i] ^= 1 << (i % 8)
		f, o, err := readArchive(bad)
		if err == nil && (f != from || !cmp.Equal(o, objects, cmp.AllowUnexported(savedObjects{}))) {
			t.Errorf("byte %d of %d is another, and the file was taken all the same", i, len(content))
		}
	}
}

// An API that refuses this client is there: what it would say now isn't known to be what was saved.
func TestRefusedIsNotAway(t *testing.T) {
	for _, status := range []int{http.StatusForbidden, http.StatusInternalServerError} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			a, file := saved(t)
			a.answer("endpointslices", status)
			a.start()
			s, _ := run(t, saving(a, file), func(s *Source) { s.answerBound = patience })
			waitFor(t, "a problem", func() bool { return len(problems(s)) > 0 && a.watches("services") > 0 })
			if status == http.StatusInternalServerError {
				waitFor(t, "the saved state", func() bool { return s.Latest() != nil })
			} else if s.Latest() != nil || !s.Status()[0].Saved.IsZero() {
				t.Error("the saved state is served")
			}
			a.answer("endpointslices", 0)
			waitFor(t, "the API", func() bool { return agrees(s, a) && s.Status()[0].Synced })
		})
	}
}

// An API server that takes connections and says nothing is away.
func TestSilent(t *testing.T) {
	a, file := saved(t)
	l, err := net.Listen("tcp", a.address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s, _ := run(t, saving(a, file), func(s *Source) { s.answerBound = time.Millisecond })
	waitFor(t, "the saved state", func() bool { return agrees(s, a) && !s.Status()[0].Saved.IsZero() })
}

// Much is saved without a copy of all of it, which would stay as garbage.
func TestSavingIsSmall(t *testing.T) {
	s := many(t, 5000)
	kept := 0
	for _, m := range slices.Concat(s.services.messages(), s.slices.messages()) {
		kept += len(m)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	content, err := s.archive(origin{})
	runtime.ReadMemStats(&after)
	if took := int(after.TotalAlloc - before.TotalAlloc); err != nil || took > kept {
		t.Errorf("%d bytes of memory to save objects of %d bytes in a file of %d, %v", took, kept, len(content), err)
	}
}

// With a change every second there is one write in ten. An hour without changes renews the time in the file. While the
// API is away the file stays.
func TestHowOftenItIsSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var last time.Time
		var writes atomic.Int64
		s, stop := heardAndSaved(t, func(_ string, content []byte) error {
			if !last.IsZero() && time.Since(last) < saveEvery {
				t.Errorf("written again after %s", time.Since(last))
			}
			from, _, err := readArchive(content)
			if err != nil || !from.Time.Equal(time.Now()) {
				t.Errorf("a file from %s: %v", from.Time, err)
			}
			last = time.Now()
			writes.Add(1)
			return nil
		})
		count := func() int64 {
			synctest.Wait()
			return writes.Swap(0)
		}
		for range 600 {
			wake.Up(s.unsaved)
			time.Sleep(time.Second)
		}
		if n := count(); n < 59 || n > 61 {
			t.Errorf("%d writes in ten minutes of changes, want 60", n)
		}
		time.Sleep(time.Hour)
		if n := count(); n < 6 || n > 10 {
			t.Errorf("%d writes in an hour without changes, want some 8", n)
		}
		s.slices.fails(listing, errors.New("away"))
		time.Sleep(time.Hour)
		if n := count(); n != 0 {
			t.Errorf("%d writes while the API is away, which makes old news look new", n)
		}
		stop()
	})
}

// What changed in a pause between two writes is saved although the API is away when that ends, as of when it went.
func TestChangeBeforeTheAPIGoesIsSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var saved []time.Time
		s, stop := heardAndSaved(t, func(_ string, content []byte) error {
			from, _, err := readArchive(content)
			saved = append(saved, from.Time)
			return err
		})
		wake.Up(s.unsaved)
		first := time.Now().UTC()
		time.Sleep(time.Second)
		wake.Up(s.unsaved)
		time.Sleep(time.Second)
		s.slices.fails(watching, errors.New("away"))
		time.Sleep(time.Hour)
		stop()
		if want := []time.Time{first, first.Add(2 * time.Second)}; !slices.EqualFunc(want, saved, time.Time.Equal) {
			t.Errorf("saved as of %v, want %v", saved, want)
		}
	})
}

// A large state is saved less often, but once a minute while there are changes.
func TestPauseAfter(t *testing.T) {
	for size, want := range map[int]time.Duration{0: 10 * time.Second, 100_000: 10 * time.Second, 250_000: 25 * time.Second, 600_000: time.Minute, 1 << 40: time.Minute} {
		if got := pauseAfter(size); got != want {
			t.Errorf("%s after %d bytes, want %s", got, size, want)
		}
	}
}

func TestCannotSave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var full atomic.Bool
		full.Store(true)
		s, stop := heardAndSaved(t, func(path string, _ []byte) error {
			if full.Load() {
				return fmt.Errorf("write %s: %w", path, syscall.ENOSPC)
			}
			return nil
		})
		wake.Up(s.unsaved)
		synctest.Wait()
		const want = "the state can't be saved, and a kproxy that starts while the API is away will serve nothing or an older one: write /state.zip: no space left on device"
		if diff := cmp.Diff([]string{want}, problems(s)); diff != "" {
			t.Errorf("problems (-want +got):\n%s", diff)
		}
		full.Store(false)
		time.Sleep(2*saveEvery + time.Second)
		synctest.Wait()
		if p := problems(s); len(p) > 0 {
			t.Errorf("still problems, although there is room again: %q", p)
		}
		stop()
	})
}

// heardAndSaved returns a Source that has heard the API and has its state written by write, until stop.
func heardAndSaved(t *testing.T, write func(path string, content []byte) error) (s *Source, stop func()) {
	t.Helper()
	s, err := Open(Config{Master: "http://127.0.0.1:1", Node: node, StateFile: "/state.zip", StateMaxAge: time.Hour, WriteFile: write})
	if err != nil {
		t.Fatal(err)
	}
	s.heard.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { s.keepSaved(ctx); close(ended) }()
	return s, func() {
		cancel()
		<-ended
	}
}

// Two clusters at one address have other certificates.
func TestAuthority(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(file, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	of := func(c rest.TLSClientConfig) string { return authorityOf(&rest.Config{TLSClientConfig: c}) }
	one := of(rest.TLSClientConfig{CAData: []byte("one")})
	if of(rest.TLSClientConfig{CAFile: file}) != one || of(rest.TLSClientConfig{CAData: []byte("two")}) == one || of(rest.TLSClientConfig{}) != "" {
		t.Error("certificates don't tell clusters apart")
	}
}
