package file

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/source"
)

// patience bounds how long a test waits for what must happen. It is far more
// than the slow poll takes, so that a busy machine fails no test.
const patience = 60 * time.Second

// start runs a Source until the test ends.
func start(t *testing.T, paths ...string) *Source {
	t.Helper()
	s := New(Config{Paths: paths, Node: "n1", Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return s
}

// await waits for the Source to serve want, and to have errors that contain
// wantErrors, one each. Where what is served changes, the trigger must come.
func await(t *testing.T, s *Source, want []string, wantErrors ...string) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond) // status changes make no trigger
	defer tick.Stop()
	for {
		errors := statusErrors(s)
		if s.Latest() != nil && slices.Equal(served(s.Latest()), want) && matchErrors(errors, wantErrors) {
			return
		}
		select {
		case <-s.Snapshots():
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("errors %q, want %q; served (-want +got):\n%s", errors, wantErrors, cmp.Diff(want, served(s.Latest())))
		}
	}
}

func statusErrors(s *Source) (out []string) {
	for _, st := range s.Status() {
		out = append(out, st.Errors...)
	}
	return out
}

func matchErrors(got, want []string) bool {
	if len(got) != len(want) {
		return false
	}
	for i := range got {
		if !strings.Contains(got[i], want[i]) {
			return false
		}
	}
	return true
}

// line returns what a Service of func web is served as.
func line(name, digit string) string {
	return "default/" + name + " 10.96.0." + digit + ":80 10.2.0." + digit + ":8080"
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

func symlink(t *testing.T, to, name string) {
	t.Helper()
	if err := os.Symlink(to, name); err != nil {
		t.Fatal(err)
	}
}

func TestWatchFilesOfADirectory(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.yaml": web("a", 1)})
	s := start(t, dir)
	await(t, s, []string{line("a", "1")})

	write(t, dir, map[string]string{"b.yaml": web("b", 2)})
	await(t, s, []string{line("a", "1"), line("b", "2")})

	write(t, dir, map[string]string{"a.yaml": web("a", 3)}) // written in place, of the same size
	await(t, s, []string{line("a", "3"), line("b", "2")})

	write(t, dir, map[string]string{".a.yaml.tmp": web("a", 4)})
	rename(t, filepath.Join(dir, ".a.yaml.tmp"), filepath.Join(dir, "a.yaml"))
	await(t, s, []string{line("a", "4"), line("b", "2")})

	// As vim saves with 'backup': the old file is moved away, a new one written.
	rename(t, filepath.Join(dir, "a.yaml"), filepath.Join(dir, "a.yaml~"))
	write(t, dir, map[string]string{"a.yaml": web("a", 5)})
	await(t, s, []string{line("a", "5"), line("b", "2")})

	remove(t, filepath.Join(dir, "a.yaml"))
	await(t, s, []string{line("b", "2")})

	rename(t, filepath.Join(dir, "b.yaml"), filepath.Join(dir, "b.txt"))
	await(t, s, nil)
}

func TestWatchASingleFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "services") // any name will do where it is given
	s := start(t, file)
	await(t, s, nil, file+": no such file or directory")
	if st := s.Status()[0]; st.Synced || st.Name != file {
		t.Errorf("status %+v of a file that was never there", st)
	}
	write(t, dir, map[string]string{"services": web("a", 1)})
	await(t, s, []string{line("a", "1")})
	write(t, dir, map[string]string{"tmp": web("a", 2)})
	rename(t, filepath.Join(dir, "tmp"), file)
	await(t, s, []string{line("a", "2")})
	remove(t, file)
	await(t, s, nil, file+": no such file or directory")
	if st := s.Status()[0]; !st.Synced {
		t.Errorf("status %+v of a file that was there", st)
	}
}

// A broken file keeps its last valid content, and says where it is broken.
func TestBrokenThenFixed(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yaml")
	write(t, dir, map[string]string{"a.yaml": web("a", 1), "b.yaml": "a: b: c\n"})
	s := start(t, dir)
	await(t, s, []string{line("a", "1")}, b+":1: mapping values are not allowed in this context")

	write(t, dir, map[string]string{"a.yaml": strings.Replace(web("a", 2), "port: 80\n", "port: 80000\n", 1), "b.yaml": web("b", 3)})
	await(t, s, []string{line("a", "1"), line("b", "3")}, a+":8: Service default/a: spec.ports[0].port: 80000 is not a port number")

	write(t, dir, map[string]string{"a.yaml": web("a", 2)})
	await(t, s, []string{line("a", "2"), line("b", "3")})

	write(t, dir, map[string]string{"a.yaml": "# nothing left\n"})
	await(t, s, []string{line("b", "3")})

	write(t, dir, map[string]string{"b.yaml": "{"})
	await(t, s, []string{line("b", "3")}, b+":1: ")
	remove(t, b) // gone is gone, broken or not
	await(t, s, nil)
}

func TestDirectoryDeletedAndCreatedAgain(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "manifests")
	write(t, dir, map[string]string{"a.yaml": web("a", 1)})
	s := start(t, dir)
	await(t, s, []string{line("a", "1")})
	for _, digit := range []int{2, 3} {
		remove(t, dir)
		await(t, s, nil, dir+": no such file or directory")
		write(t, dir, map[string]string{"a.yaml": web("a", digit)})
		await(t, s, []string{line("a", string(rune('0'+digit)))})
	}
	// Deleted and created so fast that nobody sees it gone.
	remove(t, dir)
	write(t, dir, map[string]string{"a.yaml": web("a", 4)})
	await(t, s, []string{line("a", "4")})
	write(t, dir, map[string]string{"a.yaml": web("a", 5)}) // the new directory is watched
	await(t, s, []string{line("a", "5")})

	// Another directory takes its place, while someone has the old one open.
	open, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	write(t, parent, map[string]string{"next/a.yaml": web("a", 6)})
	rename(t, dir, filepath.Join(parent, "old"))
	rename(t, filepath.Join(parent, "next"), dir)
	await(t, s, []string{line("a", "6")})
	write(t, dir, map[string]string{"a.yaml": web("a", 7)})
	await(t, s, []string{line("a", "7")})
}

// The parents of the directory may be missing, go and come back as well.
func TestParentDeletedAndCreatedAgain(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "etc", "kproxy")
	s := start(t, dir)
	await(t, s, nil, dir+": no such file or directory")
	write(t, dir, map[string]string{"a.yaml": web("a", 1)})
	await(t, s, []string{line("a", "1")})
	remove(t, filepath.Join(top, "etc"))
	await(t, s, nil, dir+": no such file or directory")
	write(t, dir, map[string]string{"a.yaml": web("a", 2)})
	await(t, s, []string{line("a", "2")})
}

// A ConfigMap volume changes by one rename of the link ..data.
func TestConfigMapVolume(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"..1/a.yaml": web("a", 1), "..1/b.yaml": web("b", 1)})
	symlink(t, "..1", filepath.Join(dir, "..data"))
	symlink(t, "..data/a.yaml", filepath.Join(dir, "a.yaml"))
	symlink(t, "..data/b.yaml", filepath.Join(dir, "b.yaml"))
	s := start(t, dir)
	one := start(t, filepath.Join(dir, "a.yaml"))
	await(t, s, []string{line("a", "1"), line("b", "1")})
	await(t, one, []string{line("a", "1")})
	for _, digit := range []int{2, 3} {
		next, old := ".."+string(rune('0'+digit)), ".."+string(rune('0'+digit-1))
		write(t, dir, map[string]string{next + "/a.yaml": web("a", digit), next + "/b.yaml": web("b", digit)})
		symlink(t, next, filepath.Join(dir, "..data_tmp"))
		rename(t, filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data"))
		remove(t, filepath.Join(dir, old))
		n := string(rune('0' + digit))
		await(t, s, []string{line("a", n), line("b", n)})
		await(t, one, []string{line("a", n)})
	}
}

// The path itself, or a file in it, is a link to somewhere else.
func TestLinksToElsewhere(t *testing.T) {
	top := t.TempDir()
	write(t, top, map[string]string{"v1/a.yaml": web("a", 1), "v2/a.yaml": web("a", 2), "shared/b.yaml": web("b", 1)})
	symlink(t, "v1", filepath.Join(top, "current"))
	symlink(t, "../shared/b.yaml", filepath.Join(top, "v1", "b.yaml"))
	s := start(t, filepath.Join(top, "current"))
	await(t, s, []string{line("a", "1"), line("b", "1")})

	write(t, top, map[string]string{"shared/b.yaml": web("b", 2)})
	await(t, s, []string{line("a", "1"), line("b", "2")})

	symlink(t, "v2", filepath.Join(top, "next"))
	rename(t, filepath.Join(top, "next"), filepath.Join(top, "current"))
	await(t, s, []string{line("a", "2")})
	write(t, top, map[string]string{"v2/a.yaml": web("a", 3)})
	await(t, s, []string{line("a", "3")})
}

// What can't be reached for now is not deleted.
func TestOutOfReach(t *testing.T) {
	top := t.TempDir()
	dir, file := filepath.Join(top, "dir"), filepath.Join(top, "file.yaml")
	write(t, top, map[string]string{"real/a.yaml": web("a", 1), "real/b.yaml": web("b", 2), "file.yaml": web("c", 3)})
	symlink(t, "real", dir)
	s := start(t, dir, file)
	all := []string{line("a", "1"), line("b", "2"), line("c", "3")}
	await(t, s, all)

	// Each is replaced in one step, or it would be gone for a moment. A link
	// that leads to itself stands for anything but "no such file".
	replace := func(path, to string) {
		t.Helper()
		symlink(t, to, path+"~")
		rename(t, path+"~", path)
	}
	const why = ": too many levels of symbolic links"
	replace(filepath.Join(top, "real", "a.yaml"), "a.yaml")
	await(t, s, all, filepath.Join(dir, "a.yaml")+why)
	replace(file, "file.yaml")
	await(t, s, all, filepath.Join(dir, "a.yaml")+why, file+why)
	replace(dir, "dir")
	await(t, s, all, dir+why, filepath.Join(dir, "a.yaml")+why, file+why)

	remove(t, filepath.Join(top, "real", "a.yaml"))
	replace(dir, "real")
	write(t, top, map[string]string{"file.yaml.tmp": web("c", 4)})
	rename(t, file+".tmp", file)
	await(t, s, []string{line("b", "2"), line("c", "4")})
}

func TestReread(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.yaml": web("a", 1)})
	s := start(t, dir)
	await(t, s, []string{line("a", "1")})
	var all sync.WaitGroup
	for range 20 { // from any number of signal handlers
		all.Go(s.Reread)
	}
	all.Wait()
	write(t, dir, map[string]string{"a.yaml": web("a", 2)})
	s.Reread()
	await(t, s, []string{line("a", "2")})
}

// Where nothing tells of changes, such as on network file systems, a poll finds them.
func TestPoll(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.yaml": web("a", 1)})
	s := New(Config{Paths: []string{dir}, Node: "n1"})
	st := newStore(s.cfg.Paths, s.note)
	s.update(st, true)
	await(t, s, []string{line("a", "1")})
	before := s.current.Load()
	s.update(st, false)
	if s.current.Load() != before {
		t.Error("a poll without a change published")
	}
	for digit := range 8 { // of one size, and within the resolution of a file's times
		write(t, dir, map[string]string{"a.yaml": web("a", 2+digit)})
		s.update(st, false)
		await(t, s, []string{line("a", string(rune('2'+digit)))})
	}
}

func TestBeforeRun(t *testing.T) {
	s := New(Config{Paths: []string{"/a", "/b"}})
	if s.Latest() != nil {
		t.Error("a Snapshot of nothing read")
	}
	if diff := cmp.Diff([]source.Status{{Name: "/a"}, {Name: "/b"}}, s.Status()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	select {
	case <-s.Snapshots():
		t.Error("a trigger before anything was read")
	default:
	}
}

// A change of a manifest that means the same is no trigger.
func TestNoTriggerWithoutChange(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.yaml": web("a", 1)})
	s := New(Config{Paths: []string{dir}, Node: "n1"})
	st := newStore(s.cfg.Paths, s.note)
	s.update(st, true)
	<-s.Snapshots()
	write(t, dir, map[string]string{"a.yaml": "# moved by a line\n" + web("a", 1)})
	s.update(st, true)
	select {
	case <-s.Snapshots():
		t.Error("a trigger for a comment")
	default:
	}
}

// Each thing is logged once, when it happens.
func TestLog(t *testing.T) {
	t.Chdir(t.TempDir())
	var out bytes.Buffer
	s := New(Config{Paths: []string{".", "missing"}, Node: "n1", Logger: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))})
	st := newStore(s.cfg.Paths, s.note)
	step := func(files map[string]string, want ...string) {
		t.Helper()
		out.Reset()
		write(t, ".", files)
		s.update(st, true)
		s.update(st, true)
		s.update(st, false)
		got := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		if out.Len() == 0 {
			got = nil
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	step(map[string]string{"a.yaml": web("a", 1) + "---\napiVersion: v1\nkind: Pod\n", "b.yaml": "a: b: c\n"},
		`level=INFO msg=manifest note="a.yaml:22: skipped v1 Pod: not a kind that kproxy reads"`,
		`level=WARN msg=manifest problem="b.yaml:1: mapping values are not allowed in this context"`,
		`level=WARN msg=manifest problem="missing: no such file or directory"`)
	step(nil)
	step(map[string]string{"b.yaml": web("a", 2)},
		`level=WARN msg=manifest problem="b.yaml:1: Service default/a: defined a second time; the one at a.yaml:1 is in force"`,
		`level=WARN msg=manifest problem="b.yaml:10: EndpointSlice default/a-1: defined a second time; the one at a.yaml:10 is in force"`)
	remove(t, "a.yaml")
	step(map[string]string{"missing/x.yaml": ""}, `level=INFO msg=manifest note="a.yaml: gone, and its objects with it"`)
}
