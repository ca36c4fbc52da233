package e2e

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// worker is the process that works for a kproxy that supervises, other than the last one: it has the control socket.
func (w *world) worker(last int) (pid int) {
	w.Helper()
	w.eventually(10*time.Second, "a process that works", func() error {
		c, err := net.Dial("unix", filepath.Join(w.dir, "kproxy.sock"))
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.(*net.UnixConn).SyscallConn()
		if err != nil {
			return err
		}
		var peer *unix.Ucred
		if ctrl := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); ctrl != nil || err != nil {
			return errors.Join(ctrl, err)
		}
		if pid = int(peer.Pid); pid == last {
			return errors.New("it is the last one still")
		}
		return nil
	})
	return pid
}

// crash kills the process that works, other than the last one, and waits until the next one serves.
func (w *world) crash(last int) (pid int) {
	w.Helper()
	pid = w.worker(last)
	served := strings.Count(w.proxy.Log(), "the forwarder serves")
	w.must(syscall.Kill(pid, syscall.SIGKILL))
	w.eventually(20*time.Second, "the next process to serve", func() error {
		if strings.Count(w.proxy.Log(), "the forwarder serves") <= served {
			return errors.New("it doesn't say so")
		}
		return nil
	})
	return pid
}

// reset returns how many connections a log says were reset because a process was killed while it moved their bytes. It fails
// the test if a crash reset more than one per loop.
func (w *world) reset(log string) (sum int) {
	w.Helper()
	for _, line := range strings.Split(log, "\n") {
		if _, n, ok := strings.Cut(line, " reset="); ok {
			count, err := strconv.Atoi(n)
			w.must(err)
			if count > runtime.NumCPU() {
				w.Errorf("%d connections were reset at once, and there are %d loops", count, runtime.NumCPU())
			}
			sum += count
		}
	}
	return sum
}

// TestCrashesGoUnnoticed: the process that works is killed, several times, and clients don't notice: connections
// and sessions go on, and new connections wait for the next process. Only what a loop is moving that very moment is lost.
func TestCrashesGoUnnoticed(t *testing.T) {
	t.Parallel()
	for _, carrier := range []plan.Mode{plan.ModeUserspace, mode} {
		t.Run(string(carrier), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			w.must(m.Write(w.manifests))
			w.start("--supervise", "--mode", string(carrier), "--alive-timeout", lasting(20*time.Second).String())
			at4, at6 := frontends(m)[0], frontends(m)[1]
			held := []*lab.Held{w.hold(at4), w.hold(at6)}
			tcp := []*lab.Traffic{w.traffic("tcp", at4, 60), w.traffic("tcp", at6, 60)}
			udp := w.traffic("udp", at4, 30)
			pid := 0
			for range 3 {
				sleep(500 * time.Millisecond)
				pid = w.crash(pid)
			}
			sleep(500 * time.Millisecond)
			var broken lab.Results
			for _, tr := range tcp {
				broken = append(broken, tr.Stop().Failed()...)
			}
			n := len(broken)
			for _, h := range held {
				if h.Err() != nil {
					n++
				}
			}
			if allowed := w.reset(w.proxy.Log()); n > allowed {
				t.Errorf("%d connections broke, and %d were reset: %v", n, allowed, broken)
				w.unbroken("after three crashes", held...)
			}
			if lost := udp.Stop().Failed(); len(lost) > 3 { // one that was on its way, each time
				w.noneFailed("after three crashes", lost)
			}
			w.stop()
		})
	}
}

// TestCrashesKeepStreamsWhole: streams that are being moved when the process is killed lose no byte and get none twice,
// fast ones, slow ones that fill the pipes, and half-closed ones; or they are reset, at most one a loop.
func TestCrashesKeepStreamsWhole(t *testing.T) {
	w := newWorld(t)
	m := w.serveOn(w.net.Backends[0], "own", 10, echoAndHash)
	w.must(m.Write(w.manifests))
	w.start("--supervise", "--mode", "userspace", "--alive-timeout", lasting(20*time.Second).String())
	var done atomic.Bool
	ends := make(chan error)
	stream := func(id int, target netip.AddrPort) error {
		c, err := w.net.Client.Dial(w.ctx, "tcp", target.String())
		if err != nil {
			return fmt.Errorf("connect: %w", err)
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(within(time.Minute))); err != nil {
			return err
		}
		sent := sha256.New()
		refused := make(chan error, 1)
		go func() {
			chunk := make([]byte, 64<<10)
			random := mathrand.NewChaCha8([32]byte{byte(id)})
			for n := 0; !done.Load() && (id%3 != 2 || n < 40); n++ { // every third is half closed soon
				_, _ = random.Read(chunk)
				sent.Write(chunk)
				if _, err := c.Write(chunk); err != nil {
					refused <- err // a socket tells of a reset once
					return
				}
			}
			_ = c.(*net.TCPConn).CloseWrite()
		}()
		got, b := sha256.New(), make([]byte, 256<<10)
		var tail []byte // the last bytes, which may be the hash
		for {
			n, err := c.Read(b)
			tail = append(tail, b[:n]...)
			if over := len(tail) - sha256.Size; over > 0 {
				got.Write(tail[:over])
				tail = append(tail[:0], tail[over:]...)
			}
			if errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return err
			}
			if id%3 != 0 && !done.Load() {
				sleep(10 * time.Millisecond)
			}
		}
		if want := sent.Sum(nil); !bytes.Equal(tail, want) || !bytes.Equal(got.Sum(nil), want) {
			select {
			case err := <-refused:
				return err
			default:
			}
			return errors.New("it isn't what was sent")
		}
		return nil
	}
	const streams = 12
	for id := range streams {
		go func() { ends <- stream(id, frontends(m)[id%2]) }()
	}
	pid := 0
	for range 3 {
		sleep(time.Second)
		pid = w.crash(pid)
	}
	done.Store(true)
	broken := 0
	for range streams {
		if err := <-ends; errors.Is(err, syscall.ECONNRESET) {
			broken++
		} else if err != nil {
			t.Error(err)
		}
	}
	if allowed := w.reset(w.proxy.Log()); broken > allowed {
		t.Errorf("%d streams were reset, and the log says %d", broken, allowed)
	}
	t.Logf("%d of %d streams were reset", broken, streams)
}

// TestSupervisorFaults: the supervisor passes on how the process that works ends, one that is killed itself
// leaves it serving, and one whose process crashes again and again says so and starts it less often.
func TestSupervisorFaults(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--supervise", "--mode", "userspace")
	pid := 0
	for range 4 {
		pid = w.crash(pid)
	}
	if !strings.Contains(w.proxy.Log(), `"connections go on"=false pause=1s`) {
		t.Error("after four crashes in a row it doesn't begin anew")
	}
	w.ask(w.net.Client, "tcp", frontends(m)[0])

	pid = w.worker(pid)
	held := w.hold(frontends(m)[0])
	w.must(syscall.Kill(w.proxy.PID(), syscall.SIGKILL))
	sleep(500 * time.Millisecond)
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.unbroken("after its supervisor was killed", held)
	w.must(held.Close())
	w.must(syscall.Kill(pid, syscall.SIGTERM))
	_ = w.proxy.Wait(w.ctx) // until both have ended: killed
	w.refuses(w.net.Client, "tcp", frontends(m)[0])

	w.configure("--supervise", "--socket", "/dev/null/no")
	w.must(w.proxy.Start())
	var exit *exec.ExitError
	if err := w.proxy.Wait(w.ctx); !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Errorf("with a socket that can't be it ended with %v, want status 2", err)
	}
}
