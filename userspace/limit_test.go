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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// limitedServer is a Server in a process that may have 1,024 file descriptors.
// It serves until its input ends.
func limitedServer() int {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 1024}); err != nil {
		fmt.Println("error:", err)
		return 1
	}
	return serveAsProcess(func(*Server, *atomic.Bool) { io.Copy(io.Discard, os.Stdin) })
}

// starvingServer is a Server in a process that has no descriptors left from
// one line of input to the next, whatever its budget says.
func starvingServer() int {
	return serveAsProcess(func(s *Server, straight *atomic.Bool) {
		in := bufio.NewReader(os.Stdin)
		in.ReadString('\n')
		var files []*os.File
		unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64})
		for {
			f, err := os.Open(os.DevNull)
			if err != nil {
				break
			}
			files = append(files, f)
		}
		fmt.Println("starving")
		in.ReadString('\n')
		fmt.Println("userspace:", probeIPv4(s))
		s.fallback.Store(true)
		s.starved.Store(sinceEpoch() - int64(2*exhaustionPatience))
		fmt.Println("kernel:", probeIPv4(s))
		for _, f := range files {
			f.Close()
		}
		in.ReadString('\n')
		straight.Store(true)
		fmt.Println("recovered:", probeIPv4(s))
		in.ReadString('\n')
	})
}

// originOrStraight is for connections headed to vip or, while straight is set,
// for those that weren't redirected, such as a probe's.
func originOrStraight(straight *atomic.Bool) func(int, service.Family) (netip.AddrPort, error) {
	return func(fd int, f service.Family) (netip.AddrPort, error) {
		if straight.Load() {
			return notRedirected(fd, f)
		}
		return vip, nil
	}
}

func probeIPv4(s *Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return s.probeTCP(ctx, s.tcp[0])
}

// serveAsProcess prints the port it serves at, serves until wait returns, and
// prints what it counted.
func serveAsProcess(wait func(s *Server, straight *atomic.Bool)) int {
	ep, err := netip.ParseAddrPort(os.Getenv("KPUS_ENDPOINT"))
	var straight atomic.Bool
	s := New(Config{TCPOrigin: originOrStraight(&straight)})
	if err == nil {
		err = s.Listen()
	}
	if err != nil {
		fmt.Println("error:", err)
		return 1
	}
	serve(s, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	go s.Run(context.Background())
	tcp, _ := s.Ports()
	fmt.Println(tcp)
	wait(s, &straight)
	c := countersOf(s, testServiceKey("s"))
	fmt.Printf("total %d failed %d retried %d\n", c.Total, c.Failed, c.Retried)
	return 0
}

// process is a test binary in one of its roles.
type process struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	addr netip.AddrPort // where it serves
}

func startProcess(t testing.TB, role string, endpoint netip.AddrPort) *process {
	t.Helper()
	p := launch(t, role, endpoint, func(*exec.Cmd) {})
	var err error
	p.addr, err = netip.ParseAddrPort("127.0.0.1:" + p.line(t))
	must(t, err)
	return p
}

// launch starts a process that needn't say where it serves.
func launch(t testing.TB, role string, endpoint netip.AddrPort, prepare func(*exec.Cmd)) *process {
	t.Helper()
	p := &process{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), roleEnv+"="+role, "KPUS_ENDPOINT="+endpoint.String())
	p.cmd.Stderr = os.Stderr
	prepare(p.cmd)
	var err error
	p.in, err = p.cmd.StdinPipe()
	must(t, err)
	out, err := p.cmd.StdoutPipe()
	must(t, err)
	p.out = bufio.NewReader(out)
	must(t, p.cmd.Start())
	t.Cleanup(func() { p.cmd.Process.Kill() })
	return p
}

func (p *process) line(t testing.TB) string {
	t.Helper()
	line, err := p.out.ReadString('\n')
	must(t, err)
	return strings.TrimSpace(line)
}

// end ends the process's input and returns the last line it prints.
func (p *process) end(t testing.TB) string {
	t.Helper()
	p.in.Close()
	line := p.line(t)
	must(t, p.cmd.Wait())
	return line
}

// Accept that fails for want of descriptors (EMFILE) is tried again until
// there are some. Where the kernel can serve instead, the probe says so.
func TestAcceptRecovers(t *testing.T) {
	p := startProcess(t, "starving", tcpEndpoint(t, named("a")))
	io.WriteString(p.in, "\n")
	if got := p.line(t); got != "starving" {
		t.Fatal(got)
	}
	c := dial(t, p.addr) // waits in the backlog
	c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if got, err := tryAsk(c, "x"); err == nil {
		t.Fatalf("answer %q from a process that can't accept", got)
	}
	io.WriteString(p.in, "\n")
	for _, want := range []string{"userspace: <nil>", "kernel: out of file descriptors: 0 connections are open"} {
		if got := p.line(t); got != want {
			t.Errorf("probe in mode %s, want %s", got, want)
		}
	}
	c.SetReadDeadline(time.Now().Add(patience))
	if got, err := bufio.NewReader(c).ReadString('\n'); got != "a x\n" {
		t.Errorf("answer %q, %v", got, err)
	}
	c.Close()
	io.WriteString(p.in, "\n")
	if got := p.line(t); got != "recovered: <nil>" {
		t.Errorf("probe after that: %s", got)
	}
	if got := p.end(t); got != "total 1 failed 0 retried 0" {
		t.Errorf("server: %s", got)
	}
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
	p := startProcess(t, "limited", ep)
	var wg sync.WaitGroup
	errs := make(chan error, clients)
	for range clients {
		wg.Go(func() { errs <- oneClient(p.addr) })
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got, want := p.end(t), fmt.Sprintf("total %d failed 0 retried 0", clients); got != want {
		t.Errorf("server: %s, want %s", got, want)
	}
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
	b, told := newBudget(4), 0
	b.notify = func() { told++ }
	if !b.tryOrWait(2) || !b.tryAcquire(2) || b.tryAcquire(1) {
		t.Fatal("4 isn't 2 and 2")
	}
	if b.release(1); told != 0 {
		t.Error("told although nobody waits")
	}
	if b.tryOrWait(2) {
		t.Error("took 2 of 1")
	}
	if b.release(1); told != 1 || !b.tryOrWait(2) {
		t.Errorf("told %d times of what was released, want once, and then there are 2", told)
	}
}

// When the clients that took all descriptors have gone, the probe succeeds, though no other client
// has come to show that there is room.
func TestProbeAfterTheBudget(t *testing.T) {
	d := testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}}
	p := testPlan(d)
	p.Kernel = []plan.DataPlane{plan.IPVS}
	var straight atomic.Bool
	s := start(t, Config{MaxFDs: 256, TCPOrigin: originOrStraight(&straight)}, p)
	var conns []*net.TCPConn
	for range divide(256).tcp / fdsPerConnection {
		c := connect(t, s)
		ask(t, c, "x")
		conns = append(conns, c)
	}
	eventually(t, "the loop waits", func() bool { return s.waiting.Load() != 0 })
	s.waiting.Store(sinceEpoch() - int64(2*exhaustionPatience))
	if err := probeIPv4(s); err == nil {
		t.Error("probe = nil at the budget")
	}
	straight.Store(true) // the probe is all that comes now
	for _, c := range conns {
		c.Close()
	}
	eventually(t, "the probe to succeed", func() bool { return probeIPv4(s) == nil && s.waiting.Load() == 0 })
}

// At the budget the listener isn't expected to accept; the probe passes, for
// some time only if the kernel can serve instead, and waiting clients are
// served when others leave.
func TestProbeAtTheBudget(t *testing.T) {
	ep := tcpEndpoint(t, named("a"))
	d := testService{name: "s", eps: []netip.AddrPort{ep}}
	var straight atomic.Bool
	s := start(t, Config{MaxFDs: 256, TCPOrigin: originOrStraight(&straight)}, testPlan(d))
	n := divide(256).tcp / fdsPerConnection
	var conns []*net.TCPConn
	for range n {
		c := connect(t, s)
		ask(t, c, "x")
		conns = append(conns, c)
	}
	late := connect(t, s)
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	eventually(t, "the loop waits", func() bool { return s.waiting.Load() != 0 })
	long := sinceEpoch() - int64(2*exhaustionPatience)
	for _, tt := range []struct {
		kernel []plan.DataPlane
		since  int64
		want   string
	}{
		{nil, sinceEpoch(), "<nil>"},
		{nil, long, "<nil>"},
		{[]plan.DataPlane{plan.IPVS}, sinceEpoch(), "<nil>"},
		{[]plan.DataPlane{plan.IPVS}, long, fmt.Sprintf("out of file descriptors: %d connections are open", n)},
	} {
		p := testPlan(d)
		p.Kernel = tt.kernel
		serve(s, p)
		s.waiting.Store(tt.since)
		if err := s.probeTCP(ctx, s.tcp[0]); fmt.Sprint(err) != tt.want {
			t.Errorf("kernel %s: probe = %v at the budget, want %s", tt.kernel, err, tt.want)
		}
	}
	for _, c := range conns {
		c.Close()
	}
	if got := ask(t, late, "x"); got != "a x" {
		t.Errorf("the client that waited got %q", got)
	}
	straight.Store(true)
	if err := probeIPv4(s); err != nil {
		t.Errorf("probe = %v when there are descriptors again", err)
	}
}

func TestBudgetUse(t *testing.T) {
	s := New(Config{})
	if got := s.Budget(service.TCP); got != (BudgetUse{}) {
		t.Errorf("before Listen: %+v", got)
	}
	s.tcpBudget, s.udpBudget = newBudget(4), newBudget(2)
	s.tcpBudget.tryOrWait(fdsPerConnection)
	if got, want := s.Budget(service.TCP), (BudgetUse{Used: 2, Limit: 4}); got != want {
		t.Errorf("TCP: %+v, want %+v", got, want)
	}
	if got, want := s.Budget(service.UDP), (BudgetUse{Limit: 2}); got != want {
		t.Errorf("UDP: %+v, want %+v", got, want)
	}
	s.tcpBudget.release(fdsPerConnection)
	if got := s.Budget(service.TCP).Used; got != 0 {
		t.Errorf("after release: %d used", got)
	}
}

// tableSize returns how many descriptors this process's table holds before it has
// to grow (FDSize in proc_pid_status(5)).
func tableSize(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if size, ok := strings.CutPrefix(line, "FDSize:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(size))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("/proc/self/status has no FDSize")
	return 0
}

func TestListenMakesRoomForDescriptors(t *testing.T) {
	s := New(Config{})
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	defer s.closeAll()
	limit, err := raiseFDs()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := tableSize(t), min(limit, roomAtOnce); got < want {
		t.Errorf("the table holds %d descriptors, want %d at least", got, want)
	}
}
