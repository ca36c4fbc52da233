package userspace

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// patience is how long tests wait for what must happen.
const patience = 20 * time.Second

// lifetime bounds the use of a connection from when a test opens it.
const lifetime = 15 * patience

// vip is the address of the service in loopback tests.
var vip = netip.MustParseAddrPort("10.96.0.1:80")

// addrPort converts the address of a TCP or UDP socket. IPv4-mapped addresses
// become IPv4 ones.
func addrPort(a net.Addr) netip.AddrPort {
	var ap netip.AddrPort
	switch a := a.(type) {
	case *net.TCPAddr:
		ap = a.AddrPort()
	case *net.UDPAddr:
		ap = a.AddrPort()
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// testService describes a service port for tests.
type testService struct {
	name  string
	proto service.Protocol
	vip   netip.AddrPort
	eps   []netip.AddrPort
	port  service.Port // further fields
	front func(*plan.Frontend)
}

// key is the service port's name.
func (d testService) key() service.Key {
	return service.Key{Namespace: "test", Name: d.name, Protocol: d.proto}
}

// prepare prepares a plan whatever came before it; serve commits it as well.
func prepare(s *Server, p *plan.Plan) { s.Prepare(p, plan.Between(nil, p)) }

func serve(s *Server, p *plan.Plan) {
	prepare(s, p)
	s.Commit()
}

// testPlan builds a plan of services; defaults are one TCP service on vip.
func testPlan(services ...testService) *plan.Plan {
	p := &plan.Plan{}
	for _, d := range services {
		if d.proto == 0 {
			d.proto = service.TCP
		}
		if !d.vip.IsValid() {
			d.vip = vip
		}
		port := d.port
		port.Key = d.key()
		port.Number = cmp.Or(port.Number, d.vip.Port())
		if port.Retries == 0 {
			port.Retries = -1
		}
		s := &plan.Service{Port: &port, DataPlane: plan.Userspace}
		f := plan.Frontend{
			Kind: plan.ClusterIP, Family: service.FamilyOf(d.vip.Addr()), Protocol: d.proto, Address: d.vip,
			Verdict: plan.Forward, Masquerade: plan.MasqueradeAlways,
		}
		if d.front != nil {
			d.front(&f)
		}
		s.Frontends = []plan.Frontend{f}
		for _, a := range d.eps {
			s.Groups[f.Family].Cluster = append(s.Groups[f.Family].Cluster, plan.Backend{Address: a, Weight: 1})
			s.Endpoints = append(s.Endpoints, plan.Endpoint{Endpoint: &service.Endpoint{Address: a, Ready: true, Serving: true}, Probed: &plan.Probed{Health: "unknown"}, Usable: true})
		}
		slices.SortFunc(s.Endpoints, func(a, b plan.Endpoint) int { return a.Address.Compare(b.Address) })
		p.Services = append(p.Services, s)
	}
	return p
}

// drainAtEnd ends at the test's end what s has left.
func drainAtEnd(t testing.TB, s *Server) {
	t.Cleanup(func() {
		over, cancel := context.WithCancel(context.Background())
		cancel()
		s.Drain(over)
	})
}

// start runs a Server with p until the test ends.
func start(t testing.TB, cfg Config, p *plan.Plan) *Server {
	t.Helper()
	if cfg.TCPOrigin == nil {
		cfg.TCPOrigin = func(int, service.Family) (netip.AddrPort, error) { return vip, nil }
	}
	s := New(cfg)
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	if p != nil {
		serve(s, p)
	}
	ran := make(chan error, 1)
	go func() { ran <- s.Run(context.Background()) }()
	t.Cleanup(func() {
		over, cancel := context.WithCancel(context.Background())
		cancel()
		s.Drain(over)
		if err := <-ran; err != nil {
			t.Errorf("Run() = %v", err)
		}
	})
	return s
}

// connect connects to the Server as a client on loopback.
func connect(t testing.TB, s *Server) *net.TCPConn {
	t.Helper()
	tcp, _ := s.Ports()
	return dial(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), tcp))
}

func dial(t testing.TB, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := tryDial(to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func tryDial(to netip.AddrPort) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: patience}
	c, err := d.Dial("tcp", to.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), c.SetDeadline(time.Now().Add(lifetime))
}

// endpointAt listens on addr and serves each connection in a goroutine. Both
// the listener and the connections are closed when the test ends.
func endpointAt(t testing.TB, addr string, serve func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	conns := map[net.Conn]bool{} // those that are open
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		defer mu.Unlock()
		for c := range conns {
			c.Close()
		}
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns[c] = true
			mu.Unlock()
			go func() {
				serve(c.(*net.TCPConn))
				if errors.Is(c.SetDeadline(time.Time{}), net.ErrClosed) {
					mu.Lock()
					delete(conns, c)
					mu.Unlock()
				}
			}()
		}
	}()
	return addrPort(l.Addr())
}

func tcpEndpoint(t testing.TB, serve func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	return endpointAt(t, "127.0.0.1:0", serve)
}

// named answers each line with its name and the line, and closes at the end.
func named(name string) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		defer c.Close()
		in := bufio.NewScanner(c)
		for in.Scan() {
			if _, err := io.WriteString(c, name+" "+in.Text()+"\n"); err != nil {
				return
			}
		}
	}
}

// refusing is an address on which nothing listens.
func refusing(t testing.TB) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return addrPort(l.Addr())
}

// hanging is an address that answers nothing at all.
func hanging(t testing.TB) netip.AddrPort {
	t.Helper()
	run(t, "iptables", "-I", "INPUT", "-d", "127.9.9.9", "-j", "DROP")
	t.Cleanup(func() { run(t, "iptables", "-D", "INPUT", "-d", "127.9.9.9", "-j", "DROP") })
	return netip.MustParseAddrPort("127.9.9.9:80")
}

func run(t testing.TB, command ...string) {
	t.Helper()
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
}

// ask sends a line and returns the answer.
func ask(t testing.TB, c net.Conn, line string) string {
	t.Helper()
	answer, err := tryAsk(c, line)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func tryAsk(c net.Conn, line string) (string, error) {
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return "", err
	}
	answer, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSuffix(answer, "\n"), err
}

// echo answers with what it gets.
func echo(c *net.TCPConn) {
	io.Copy(c, c)
	c.Close()
}

// reset closes with a reset.
func reset(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
}

// readEnd reads until the end and says how it ended: "eof", "reset" or the error.
func readEnd(c net.Conn) (data, end string) {
	b, err := io.ReadAll(c)
	switch {
	case err == nil:
		return string(b), "eof"
	case errors.Is(err, syscall.ECONNRESET):
		return string(b), "reset"
	}
	return string(b), err.Error()
}

// wantRefused connects and expects a reset.
func wantRefused(t testing.TB, s *Server) {
	t.Helper()
	tcp, _ := s.Ports()
	c, err := tryDial(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), tcp))
	if errors.Is(err, syscall.ECONNRESET) {
		return // so soon that connect saw it
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if data, end := readEnd(c); data != "" || end != "reset" {
		t.Errorf("client read %q, %s; want a reset", data, end)
	}
}

// eventually waits for something that other goroutines do.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never happened: %s", what)
		}
	}
}

// inNamespace tells the test process that it runs in its own network namespace.
const inNamespace = "KPUS_NAMESPACE"

// TestMain runs all tests in a network namespace of their own, which the
// kernel removes with the process, however it ends. Every thread is in it, so
// that sockets which the Server opens from any goroutine are too.
func TestMain(m *testing.M) {
	if role, ok := roles[os.Getenv(roleEnv)]; ok {
		os.Exit(role())
	}
	if os.Getenv(inNamespace) != "" {
		if err := loopbackUp(); err != nil {
			fmt.Fprintln(os.Stderr, "bring up loopback:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
	}
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState == nil {
			fmt.Fprintln(os.Stderr, "skipped: needs root, or user namespaces, for a network namespace of its own:", err)
			os.Exit(0)
		}
		os.Exit(1)
	}
}

func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// roles are what the test binary does instead of testing when a test starts it
// as a process of its own.
const roleEnv = "KPUS_ROLE"

var roles = map[string]func() int{"limited": limitedServer, "starving": starvingServer, "successor": successor, "echoes": echoes}

// countersOf returns the figures of a service port, live bytes included.
func countersOf(s *Server, k service.Key) Counters {
	s.Settle()
	m, _ := s.Meter(k)
	return m.Counters()
}
