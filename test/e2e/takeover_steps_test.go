package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fxamacker/cbor/v2"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/userspace/handover"
)

// between stands between a kproxy and the next one that asks to take over from it. It passes on what they say, each message with its
// descriptors, whatever messages there are, and calls a function just before and just after each.
type between struct {
	at        func(point int, after bool, said string) // may kill; the points are numbered from 0
	mu        sync.Mutex
	point     int
	stopped   bool // nothing is passed on any more
	confirmed bool // the newcomer has sent CONFIRM
}

// watch has b stand between the one that runs and a newcomer that it starts. It returns when their conversation is over.
func (b *between) watch(w *world, start func() *lab.Process) (next *lab.Process) {
	w.Helper()
	path, aside := w.socket(), w.socket()+".aside"
	w.must(os.Rename(path, aside))
	l, err := net.Listen("unix", path)
	w.must(err)
	next = start()
	w.must(l.(*net.UnixListener).SetDeadline(time.Now().Add(within(30 * time.Second))))
	theirs, err := l.Accept()
	l.Close() // which removes it
	w.must(os.Rename(aside, path))
	w.must(err)
	defer theirs.Close()
	ours, err := net.Dial("unix", path)
	w.must(err)
	defer ours.Close()
	w.must(passHead(theirs, ours))
	w.must(passHead(ours, theirs))
	var both sync.WaitGroup
	for _, c := range [][2]net.Conn{{theirs, ours}, {ours, theirs}} {
		from, to := handover.NewConn(c[0].(*net.UnixConn)), handover.NewConn(c[1].(*net.UnixConn))
		both.Go(func() {
			for b.pass(from, to) {
			}
			theirs.Close()
			ours.Close()
		})
	}
	both.Wait()
	return next
}

// passHead passes on the head of a request or an answer of HTTP, and nothing behind it.
func passHead(from, to net.Conn) error {
	var head []byte
	for one := make([]byte, 1); !strings.HasSuffix(string(head), "\r\n\r\n"); head = append(head, one...) {
		if _, err := from.Read(one); err != nil {
			return err
		}
	}
	_, err := to.Write(head)
	return err
}

// pass passes a message on; false if there is none any more.
func (b *between) pass(from, to *handover.Conn) bool {
	var m cbor.RawMessage
	files, err := from.Receive(within(time.Minute), &m)
	defer handover.CloseFiles(files)
	if err != nil {
		return false
	}
	said := fmt.Sprintf("%d bytes and %d descriptors", len(m), len(files))
	if string(m) == "\xa1\x01\x03" && len(files) == 0 {
		said = confirm
	}
	return b.reached(false, said) && to.Send(within(time.Minute), &m, files...) == nil && b.reached(true, said)
}

const confirm = "CONFIRM"

// reached says that a point was, and reports whether to go on.
func (b *between) reached(after bool, said string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stopped {
		return false
	}
	b.confirmed = b.confirmed || said == confirm
	what := "before "
	if after {
		what = "after "
	}
	b.at(b.point, after, what+said)
	b.point++
	return !b.stopped
}

// killAt kills the newcomer at a point, from which on nothing is passed on, or the other one: the two are cut off by the kernel only then,
// as a keeper has the sockets of its process open for a while. The newcomer isn't killed once it has sent CONFIRM: it serves from then on.
func (b *between) killAt(w *world, point int, newcomer bool, victim func() int) (where *string) {
	where = new(string)
	b.at = func(n int, after bool, said string) {
		signal := syscall.SIGKILL
		switch {
		case newcomer && b.confirmed:
			return
		case newcomer && n == point-1 && !after: // so that it doesn't go on by what it gets before it is killed
			signal = syscall.SIGSTOP
		case n != point:
			return
		default:
			*where, b.stopped = fmt.Sprintf("point %d, %s", n, said), newcomer
		}
		if err := syscall.Kill(victim(), signal); err != nil {
			w.Errorf("%s at point %d, %s: %v", signal, n, said, err)
		}
	}
	return where
}

// stepsServices starts a kproxy with services in userspace. Clients of theirs come by begin and end by check: of connections may have
// broken, by resets, as many as resets says, which is what the logs tell of, and datagrams of a session may be lost where there were
// kills; all else goes on.
func stepsServices(w *world, args ...string) (begin func() (check func(what string, resets func() int, kills int))) {
	w.Helper()
	m := newManifest("web", 10, w.net.Backends...)
	own := w.serveOn(w.net.Backends[0], "own", 12, echoHash)
	w.must(m.Write(w.manifests))
	w.must(own.Write(w.manifests))
	w.start(append(args, "--mode", "userspace")...)
	at := frontends(m)[0]
	return func() func(string, func() int, int) {
		w.Helper()
		tcp, udp := w.hold(at), w.holdBy("udp", at)
		slow := w.stream("slow", frontends(own)[0], 1000, 20*time.Millisecond)
		tr := w.traffic("tcp", at, 20)
		return func(what string, resets func() int, kills int) {
			w.Helper()
			ends := []error{tcp.Close(), slow.end()}
			for _, r := range tr.Stop().Failed() {
				ends = append(ends, r.Err)
			}
			broken, told := slices.DeleteFunc(ends, func(err error) bool { return err == nil }), resets()
			if len(broken) > told || slices.ContainsFunc(broken, func(err error) bool { return !isReset(err) }) {
				w.Errorf("%s %d connections broke, and the logs tell of %d resets: %v", what, len(broken), told, errors.Join(broken...))
			}
			if err := udp.Close(); err != nil && (kills == 0 || !errors.Is(err, os.ErrDeadlineExceeded)) {
				w.unbroken(what, udp)
			}
			w.Logf("%s %d connections broke, and the logs tell of %d resets", what, len(broken), told)
		}
	}
}

// TestNewcomerKilledAtEveryStep: a kproxy that is to take over is killed before and after each message, and the one that runs goes on: no
// connection breaks or fails. There is no way back from the moment on in which it sends CONFIRM: it serves from then on.
func TestNewcomerKilledAtEveryStep(t *testing.T) {
	w := newWorld(t)
	check := stepsServices(w, "--alive-timeout", lasting(20*time.Second).String())() // half of it is how long it waits for the newcomer
	points := 0
	for ; ; points++ {
		b := &between{}
		var mu sync.Mutex
		var next *lab.Process
		mu.Lock()
		where := b.killAt(w, points, true, func() int {
			mu.Lock()
			defer mu.Unlock()
			return next.PID()
		})
		said := strings.Count(w.proxy.Log(), "this one goes on")
		b.watch(w, func() *lab.Process { next = w.newcomer(); mu.Unlock(); return next })
		if b.confirmed {
			w.must(w.proxy.Wait(w.ctx))
			w.proxy = next
			break
		}
		w.eventually(30*time.Second, "kproxy to go on after the newcomer was killed at "+*where, func() error {
			if strings.Count(w.proxy.Log(), "this one goes on") == said {
				return errors.New("it doesn't say so")
			}
			return nil
		})
		if *where == "" || !w.proxy.Running() {
			t.Fatalf("their conversation ended before point %d, and CONFIRM didn't come; running: %v", points, w.proxy.Running())
		}
		_ = next.Wait(w.ctx)
	}
	t.Logf("a newcomer was killed at %d points", points)
	check("while newcomers were killed at every step", func() int { return 0 }, 0)
}

// TestKilledAtEveryStepOfATakeover: the process that works is killed before and after each message of the one that takes over from it. Its
// supervisor starts it again, or the other one has it all: one is left, and connections go on, but for those that a loop was moving.
func TestKilledAtEveryStepOfATakeover(t *testing.T) {
	w := newWorld(t)
	begin := stepsServices(w, "--supervise", "--alive-timeout", lasting(20*time.Second).String())
	points, all := 0, []*lab.Process{w.proxy}
	resets := func() (sum int) {
		for _, p := range all {
			sum += w.reset(p.Log())
		}
		return sum
	}
	check := begin() // of clients that see every kill
	for done := false; !done; points++ {
		before, checkPoint := resets(), begin()
		b := &between{}
		old, last := w.worker(0), w.proxy
		where := b.killAt(w, points, false, func() int { return old })
		next := b.watch(w, func() *lab.Process { return w.newcomer() })
		done, all = *where == "", append(all, next)
		w.eventually(time.Minute, "one to be left after the other was killed at "+*where, func() error {
			if last.Running() == next.Running() {
				return fmt.Errorf("running: the last %v, the next %v", last.Running(), next.Running())
			}
			return nil
		})
		if next.Running() {
			w.proxy = next
		} else {
			w.Logf("the one that was killed at %s is left", *where)
			w.takeOver() // or its supervisor would wait before it starts it the next time
			all = append(all, w.proxy)
		}
		w.ready()
		kills := 1
		if done { // the takeover was over before that point
			kills = 0
		}
		checkPoint("while it was killed at "+cmp.Or(*where, "no point"), func() int { return resets() - before }, kills)
	}
	t.Logf("the process that works was killed at %d points", points-1)
	check("while it was killed at every step", resets, points-1)
}
