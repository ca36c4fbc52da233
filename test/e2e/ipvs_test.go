package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// virtuals are the virtual servers and the addresses of dummy links, where
// kproxy works with IPVS. Without IPVS there are none.
func (w *world) virtuals() string {
	w.Helper()
	if w.plane != plan.IPVS {
		return ""
	}
	var addresses []string
	for _, line := range strings.Split(w.node("ip", "-o", "addr", "show", "type", "dummy"), "\n") {
		// A link has another address of its own each time it is made.
		if fields := strings.Fields(line); len(fields) > 3 && !strings.HasPrefix(fields[3], "fe80:") {
			addresses = append(addresses, strings.Join(fields[1:4], " "))
		}
	}
	links := dynamic.ReplaceAllString(w.node("ip", "-o", "link", "show", "type", "dummy"), "")
	return "ipvs:\n" + sortedLines(strings.Split(w.node("ipvsadm", "-Sn"), "\n")) + sortedLines(addresses) + links
}

// dynamic is what differs from one making of a link to another.
var dynamic = regexp.MustCompile(`(?m)^\d+: |link/ether [0-9a-f:]+ `)

// real is a line of `ipvsadm -Ln`: a real server and its connections.
type real struct {
	address          netip.AddrPort
	weight           int
	active, inactive int
}

// reals lists the real servers of a virtual server, which is told as ipvsadm's
// arguments tell it: "-t 10.96.0.10:80". There are none if it isn't there.
func (w *world) reals(virtual ...string) []real {
	w.Helper()
	out, err := w.net.Node.Command(w.ctx, "ipvsadm", append([]string{"-Ln"}, virtual...)...).CombinedOutput()
	if err != nil {
		if strings.Contains(string(out), "No such service") {
			return nil
		}
		w.Fatalf("ipvsadm -Ln %s: %v\n%s", strings.Join(virtual, " "), err, out)
	}
	var all []real
	for _, line := range strings.Split(string(out), "\n") {
		f := strings.Fields(line) // -> ADDRESS Masq WEIGHT ACTIVE INACTIVE
		if len(f) != 6 || f[0] != "->" || f[1] == "RemoteAddress:Port" {
			continue
		}
		r := real{address: netip.MustParseAddrPort(f[1])}
		for i, to := range []*int{&r.weight, &r.active, &r.inactive} {
			*to, err = strconv.Atoi(f[3+i])
			w.must(err)
		}
		all = append(all, r)
	}
	return all
}

// realAt returns one of them.
func (w *world) realAt(target, endpoint netip.AddrPort) (real, bool) {
	w.Helper()
	for _, r := range w.reals("-t", target.String()) {
		if r.address == endpoint {
			return r, true
		}
	}
	return real{}, false
}

// awaitReal waits until a real server of a TCP virtual server has a weight; -1
// stands for one that is gone.
func (w *world) awaitReal(target, endpoint netip.AddrPort, weight int) {
	w.Helper()
	w.eventually(20*time.Second, fmt.Sprintf("%s behind %s to have weight %d", endpoint, target, weight), func() error {
		r, ok := w.realAt(target, endpoint)
		if !ok {
			r.weight = -1
		}
		if r.weight != weight {
			return fmt.Errorf("it has %d", r.weight)
		}
		return nil
	})
}

// line is a connection that a test uses and ends as it likes.
type line struct {
	*world
	conn    net.Conn
	backend string
}

// lineTo opens connections until one comes to a backend, and closes the others.
func (w *world) lineTo(backend string, target netip.AddrPort) *line {
	w.Helper()
	for range 20 {
		ctx, cancel := context.WithTimeout(w.ctx, within(5*time.Second))
		c, err := w.net.Client.Dial(ctx, "tcp", target.String())
		cancel()
		w.must(err)
		w.Cleanup(func() { c.Close() })
		l := &line{world: w, conn: c}
		a, err := l.ask()
		w.must(err)
		if l.backend = a.Backend; l.backend == backend {
			return l
		}
		l.reset()
	}
	w.Fatalf("20 connections to %s, and none came to %s", target, backend)
	return nil
}

// ask makes one exchange.
func (l *line) ask() (lab.Answer, error) {
	if err := l.conn.SetDeadline(time.Now().Add(within(3 * time.Second))); err != nil {
		return lab.Answer{}, err
	}
	if _, err := l.conn.Write([]byte("hello\n")); err != nil {
		return lab.Answer{}, err
	}
	s, err := bufio.NewReader(l.conn).ReadString('\n')
	if err != nil {
		return lab.Answer{}, err
	}
	return lab.ParseAnswer(s)
}

// lives checks that it works and that the same backend answers.
func (l *line) lives(what string) {
	l.Helper()
	if a, err := l.ask(); err != nil || a.Backend != l.backend {
		l.Errorf("%s: the connection to %s is answered by %q, %v", what, l.backend, a.Backend, err)
	}
}

// reset ends it with a reset, which IPVS forgets after 10 seconds; it remembers a
// connection that ends as usual for 2 minutes (tcp_timeouts in
// net/netfilter/ipvs/ip_vs_proto_tcp.c).
func (l *line) reset() {
	l.Helper()
	l.must(l.conn.(*net.TCPConn).SetLinger(0))
	l.must(l.conn.Close())
}
