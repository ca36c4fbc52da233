package userspace

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// wire is the connection between two processes.
type wire struct{ *handover.Conn }

func (w wire) send(m handover.Message, files []int) error { return w.Send(patience, m, files...) }

func (w wire) receive(m handover.Message) (files []int, err error) { return w.Receive(patience, m) }

// done and awaitDone are a step that both processes have reached.
func (w wire) done() error { return w.send(&handover.Ask{}, nil) }

func (w wire) awaitDone() error { _, err := w.receive(&handover.Ask{}); return err }

// newWire is one of the ends of a socket pair.
func newWire(fd int) (wire, error) {
	f := os.NewFile(uintptr(fd), "wire")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return wire{}, err
	}
	return wire{handover.NewConn(c.(*net.UnixConn))}, nil
}

// successor is a Server in a process of its own that takes over, and serves until its input ends. Then it
// prints what it has counted.
func successor() int {
	err := func() error {
		w, err := newWire(3)
		if err != nil {
			return err
		}
		s := New(Config{Origin: newOrigins(), TCPOrigin: func(int, service.Family) (netip.AddrPort, error) { return vip, nil }})
		rows := &handover.Welcome{}
		files, err := w.receive(rows)
		if err != nil {
			return err
		}
		if err := s.Inherit(rows.Listeners, files); err != nil {
			return err
		}
		tcp, err := netip.ParseAddrPort(os.Getenv("KPUS_ENDPOINT"))
		if err != nil {
			return err
		}
		udp, err := netip.ParseAddrPort(os.Getenv("KPUS_UDP_ENDPOINT"))
		if err != nil {
			return err
		}
		serve(s, testPlan(testService{name: "s", eps: []netip.AddrPort{tcp}}, udpService(udp)))
		if err := w.done(); err != nil {
			return err
		}
		state := &handover.Userspace{}
		if files, err = w.receive(state); err != nil {
			return err
		}
		if err := s.TakeOver(state, files); err != nil {
			return err
		}
		if err := w.done(); err != nil {
			return err
		}
		if err := w.awaitDone(); err != nil {
			return err
		}
		go s.Run(context.Background())
		if err := w.done(); err != nil {
			return err
		}
		io.Copy(io.Discard, os.Stdin)
		fmt.Printf("connections %d\n", countersOf(s, testServiceKey("s")).Total)
		return nil
	}()
	if err != nil {
		fmt.Println("error:", err)
		return 1
	}
	return 0
}

// echoes is an endpoint in a process of its own, whose descriptors don't count here. It echoes until its input ends.
func echoes() int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println("error:", err)
		return 1
	}
	fmt.Println(l.Addr().(*net.TCPAddr).Port)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go echo(c.(*net.TCPConn))
		}
	}()
	io.Copy(io.Discard, os.Stdin)
	return 0
}

// handToProcess has a process of its own take over from s, and says for how long neither served.
func handToProcess(t testing.TB, s *Server, tcp, udp netip.AddrPort) (p *process, pause time.Duration) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	theirs := os.NewFile(uintptr(pair[1]), "successor")
	defer theirs.Close()
	w, err := newWire(pair[0])
	must(t, err)
	defer w.Close()
	p = launch(t, "successor", tcp, func(cmd *exec.Cmd) {
		cmd.Env = append(cmd.Env, "KPUS_UDP_ENDPOINT="+udp.String())
		cmd.ExtraFiles = []*os.File{theirs}
	})
	rows, files := s.Listeners()
	must(t, w.send(&handover.Welcome{Listeners: rows}, files))
	must(t, w.awaitDone()) // its plan is prepared

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	begun := time.Now()
	h, err := s.HandOver(ctx)
	must(t, err)
	must(t, w.send(h.State, h.Files))
	must(t, w.awaitDone()) // it has taken over
	must(t, w.done())
	must(t, w.awaitDone()) // it runs
	pause = time.Since(begun)
	h.Release()
	return p, pause
}

// BenchmarkHandover is the pause for a number of connections, from the first loop's stop to the last one's start
// in another process. With -short they are few.
func BenchmarkHandover(b *testing.B) {
	sizes := []int{100, 1000, 5000}
	if testing.Short() {
		sizes = sizes[:1]
	}
	for _, n := range sizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			tcp, udp := startProcess(b, "echoes", netip.AddrPort{}).addr, first(udpEndpoint(b, "a"))
			var worst, all time.Duration
			for range b.N {
				s := start(b, Config{Origin: newOrigins()}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcp}}, udpService(udp)))
				conns := make([]net.Conn, n)
				for i := range conns {
					conns[i] = connect(b, s)
					ask(b, conns[i], "x")
				}
				p, pause := handToProcess(b, s, tcp, udp)
				worst, all = max(worst, pause), all+pause
				for _, c := range conns {
					ask(b, c, "y")
					c.Close()
				}
				p.end(b)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(all.Microseconds())/float64(b.N)/1000, "ms/pause")
			b.ReportMetric(float64(worst.Microseconds())/1000, "ms/worst")
		})
	}
}

// TestHandoverToAProcess: streams and sessions go on in another process, and those that come while
// neither serves wait for it. It counts on where this one stopped.
func TestHandoverToAProcess(t *testing.T) {
	var far soakEndpoint
	tcp, udp := tcpEndpoint(t, far.serve), first(udpEndpoint(t, "a"))
	s := start(t, Config{Origin: newOrigins()}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcp}}, udpService(udp)))
	var over atomic.Bool
	var wg sync.WaitGroup
	var connections, datagrams atomic.Int64
	for range 40 {
		wg.Go(func() {
			for !over.Load() {
				kind := behaviour(rand.IntN(int(behaviours)))
				if err := behave(s, kind); err != nil {
					t.Errorf("client who %s: %v", kind, err)
					return
				}
				connections.Add(1)
			}
		})
	}
	for range 10 {
		c := udpClient(t, s)
		wg.Go(func() {
			for i := 0; !over.Load() && answers(t, c, fmt.Sprint(i), fmt.Sprint("a ", i)); i++ {
				datagrams.Add(1)
			}
		})
	}
	eventually(t, "all are under way", func() bool { return connections.Load() > 40 && datagrams.Load() > 100 })
	p, pause := handToProcess(t, s, tcp, udp)
	t.Logf("after %d connections and %d datagrams, neither process served for %s", connections.Load(), datagrams.Load(), pause)
	n := connections.Load()
	eventually(t, "they go on", func() bool { return connections.Load() > 2*n || t.Failed() })
	over.Store(true)
	wg.Wait()
	if n := far.wrong.Load(); n > 0 {
		t.Errorf("the endpoint got wrong bytes on %d connections", n)
	}
	must(t, s.Drain(t.Context()))
	if got, want := p.end(t), fmt.Sprintf("connections %d", connections.Load()); got != want {
		t.Errorf("at the end, the other process says %s, want %s", got, want)
	}
}
