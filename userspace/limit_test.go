package userspace

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// limitedServer is a Server in a process that may have 1,024 file descriptors.
// It prints its port, probes itself, and serves until its input ends.
func limitedServer() int {
	fail := func(err error) int {
		fmt.Println("error:", err)
		return 1
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 1024}); err != nil {
		return fail(err)
	}
	ep, err := netip.ParseAddrPort(os.Getenv("KPUS_ENDPOINT"))
	if err != nil {
		return fail(err)
	}
	s := New(Config{TCPOrigin: func(c *net.TCPConn) (netip.AddrPort, error) { return vip, nil }})
	if err := s.Listen(); err != nil {
		return fail(err)
	}
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{ep}})
	s.Prepare(p)
	s.Commit(p)
	go s.Run(context.Background())
	tcp, _ := s.Ports()
	fmt.Println(tcp)
	io.Copy(io.Discard, os.Stdin)
	c := s.Counters()[testServiceKey("s")]
	fmt.Printf("total %d failed %d retried %d\n", c.Total, c.Failed, c.Retried)
	return 0
}

// 5,000 clients at once of a process that may have 1,024 descriptors are all
// served, some after a wait in the backlog, and nothing panics.
func TestDescriptorLimit(t *testing.T) {
	const clients = 5000
	must(t, os.WriteFile("/proc/sys/net/core/somaxconn", []byte("8192"), 0))
	// The handshakes of so many clients at once look like an attack.
	must(t, os.WriteFile("/proc/sys/net/ipv4/tcp_max_syn_backlog", []byte("8192"), 0))
	if limit, err := raiseFDs(); err != nil || limit < 3*clients {
		t.Skipf("needs %d file descriptors for the clients and the endpoint, may have %d (%v)", 3*clients, limit, err)
	}
	ep := tcpEndpoint(t, named("a"))
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"=limited", "KPUS_ENDPOINT="+ep.String())
	in, err := cmd.StdinPipe()
	must(t, err)
	pipe, err := cmd.StdoutPipe()
	must(t, err)
	cmd.Stderr = os.Stderr
	must(t, cmd.Start())
	defer cmd.Process.Kill()
	out := bufio.NewReader(pipe)
	line, err := out.ReadString('\n')
	must(t, err)
	to, err := netip.ParseAddrPort("127.0.0.1:" + strings.TrimSpace(line))
	must(t, err)

	var wg sync.WaitGroup
	errs := make(chan error, clients)
	for range clients {
		wg.Go(func() { errs <- oneClient(to) })
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	in.Close()
	rest, _ := io.ReadAll(out)
	if got, want := strings.TrimSpace(string(rest)), fmt.Sprintf("total %d failed 0 retried 0", clients); got != want {
		t.Errorf("server: %s, want %s", got, want)
	}
	must(t, cmd.Wait())
}

// oneClient stays for a moment, so that clients pile up.
func oneClient(to netip.AddrPort) error {
	d := net.Dialer{Timeout: time.Minute}
	c, err := d.Dial("tcp", to.String())
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	for range 2 {
		if got, err := tryAsk(c, "x"); err != nil || got != "a x" {
			return fmt.Errorf("answer %q, %w", got, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

func TestDivide(t *testing.T) {
	for _, max := range []int{256, 1024, 20000, 1 << 20} {
		l := divide(max)
		used := l.tcp + l.udp + 2*l.pipes
		if l.tcp < max/3 || l.udp < max/10 || l.pipes < 1 || used > max-64 {
			t.Errorf("divide(%d) = %+v, uses %d", max, l, used)
		}
	}
}

func TestBudget(t *testing.T) {
	b := newBudget(4)
	if !b.acquire(2) || !b.tryAcquire(2) || b.tryAcquire(1) {
		t.Fatal("4 isn't 2 and 2")
	}
	got := make(chan bool)
	go func() { got <- b.acquire(2) }()
	eventually(t, "somebody waits", b.exhausted)
	b.release(2)
	if !<-got {
		t.Error("acquire() = false after a release")
	}
	go func() { got <- b.acquire(1) }()
	eventually(t, "somebody waits", b.exhausted)
	b.close()
	if <-got {
		t.Error("acquire() = true after close")
	}
}

// At the budget the listener isn't expected to accept; the probe passes, and
// waiting clients are served when others leave.
func TestProbeAtTheBudget(t *testing.T) {
	ep := tcpEndpoint(t, named("a"))
	s := start(t, Config{MaxFDs: 256}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	n := divide(256).tcp/fdsPerConnection - 1 // the other family's loop holds one
	var conns []*net.TCPConn
	for range n {
		c := connect(t, s)
		ask(t, c, "x")
		conns = append(conns, c)
	}
	late := connect(t, s)
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	eventually(t, "the loop waits", func() bool { return s.tcp[0].waiting.Load() })
	if err := s.probeTCP(ctx, s.tcp[0]); err != nil {
		t.Errorf("Probe() = %v at the budget", err)
	}
	for _, c := range conns {
		c.Close()
	}
	if got := ask(t, late, "x"); got != "a x" {
		t.Errorf("the client that waited got %q", got)
	}
}
