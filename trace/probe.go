package trace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/service"
)

// ErrClient says that the client that was asked for can't be found, or a probe can't
// honestly be sent from there.
var ErrClient = errors.New("the client can't be found")

// How long a probe waits: for a connection, and for the answer to a datagram.
const (
	probeTimeout  = 3 * time.Second
	answerTimeout = time.Second
	probesAtOnce  = 16
)

// probe makes one connection and closes it, or sends one datagram, from where the
// client is, and reads its conntrack entry.
func (t *tracer) probe(ctx context.Context, r *Result) *Probe {
	p := &Probe{Conntrack: []string{}, From: "this node itself, whose packets take another way than those of pods and other hosts"}
	if t.req.Netns != "" {
		p.From = "network namespace " + t.req.Netns
	}
	flows, err := conntrack.Dial()
	if err != nil {
		p.Note = "conntrack can't be read: " + err.Error()
	} else {
		defer flows.Close()
	}
	local, found := t.send(ctx, p, func(local netip.AddrPort) []conntrack.Flow { return t.flowsOf(flows, local, p) })
	if !local.IsValid() {
		return p
	}
	for i := range found {
		f := &found[i]
		p.Conntrack = append(p.Conntrack, flowText(f))
		if e := endpointOf(f, r); e.IsValid() && p.Outcome != "timeout" && p.Outcome != "unreachable" {
			p.Endpoint = e
		}
	}
	if len(found) == 0 && p.Note == "" {
		p.Note = "conntrack has no entry of it"
	}
	return p
}

// there runs f where the client is.
func (t *tracer) there(f func() error) error {
	if t.req.Netns == "" {
		return f()
	}
	return inside(t.req.Netns, f)
}

// send sends the probe and, while its socket is still open, reads conntrack.
func (t *tracer) send(ctx context.Context, p *Probe, read func(netip.AddrPort) []conntrack.Flow) (netip.AddrPort, []conntrack.Flow) {
	local := netip.AddrPortFrom(t.req.From, 0)
	if !t.req.From.IsValid() {
		local = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
		if t.req.Address.Addr().Is6() {
			local = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
		}
	}
	if t.req.Protocol == service.UDP {
		return t.sendDatagram(p, local, read)
	}
	// A port of one's own tells the entry from others', also where the connection
	// fails.
	free := func() (uint16, error) { return freePort(t.req.From, t.req.Address.Addr()) }
	var c net.Conn
	err := t.there(func() (err error) {
		c, local, err = p.dial(ctx, t.req.Address, local.Addr(), free)
		return err
	})
	p.Outcome = outcomeOf(err, "connected")
	if err != nil {
		p.Note = err.Error()
		if local.Port() == 0 {
			return netip.AddrPort{}, nil
		}
		if local.Addr().IsUnspecified() {
			local = netip.AddrPortFrom(t.client.Address, local.Port())
		}
		return local, read(local)
	}
	defer c.Close()
	local = c.LocalAddr().(*net.TCPAddr).AddrPort()
	if t.forecast != nil {
		t.awaitEndpoint(c, local, p)
	}
	return local, read(local)
}

// portTries is how often a probe takes another port, where another socket takes its port
// before it is used.
const portTries = 8

// dial connects from a free port of an address, and notes how long the last try took.
// The port of what it returns is 0 if there is none.
func (p *Probe) dial(ctx context.Context, to netip.AddrPort, addr netip.Addr, free func() (uint16, error)) (net.Conn, netip.AddrPort, error) {
	for tries := 1; ; tries++ {
		port, err := free()
		from := netip.AddrPortFrom(addr, port)
		if err != nil {
			return nil, from, err
		}
		d := net.Dialer{Timeout: probeTimeout, LocalAddr: net.TCPAddrFromAddrPort(from), Control: reuseAddress}
		start := time.Now()
		c, err := d.DialContext(ctx, "tcp", to.String())
		p.Seconds = time.Since(start).Seconds()
		// Taken by a socket, or with this service by a connection that isn't over.
		if taken := errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EADDRNOTAVAIL); !taken || tries == portTries {
			return c, from, err
		}
	}
}

// awaitEndpoint waits until userspace, which accepts first, has found an endpoint
// or given up.
func (t *tracer) awaitEndpoint(c net.Conn, local netip.AddrPort, p *Probe) {
	const poll = 20 * time.Millisecond
	for end := time.Now().Add(probeTimeout); time.Now().Before(end) && !t.endpointOfProbe(local).IsValid(); {
		c.SetReadDeadline(time.Now().Add(poll))
		if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			p.Outcome, p.Note = "refused", "kproxy accepted it, and then found no endpoint that does"
			return
		}
	}
}

// endpointOfProbe is the endpoint that userspace has connected the probe to; invalid if
// none yet.
func (t *tracer) endpointOfProbe(local netip.AddrPort) netip.AddrPort {
	if t.proxy == nil || t.proxy.Connections == nil {
		return netip.AddrPort{}
	}
	for _, x := range t.proxy.Connections() {
		if x.Client == local && x.Address == t.req.Address && x.Protocol == t.req.Protocol {
			return x.Endpoint
		}
	}
	return netip.AddrPort{}
}

func (t *tracer) sendDatagram(p *Probe, local netip.AddrPort, read func(netip.AddrPort) []conntrack.Flow) (netip.AddrPort, []conntrack.Flow) {
	start := time.Now()
	var c *net.UDPConn
	err := t.there(func() (err error) {
		c, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(local), net.UDPAddrFromAddrPort(t.req.Address))
		return err
	})
	if err != nil {
		p.Outcome, p.Note = outcomeOf(err, ""), err.Error()
		return netip.AddrPort{}, nil
	}
	defer c.Close()
	_, err = c.Write([]byte("kproxy trace\n"))
	if err == nil {
		c.SetReadDeadline(time.Now().Add(answerTimeout))
		_, err = c.Read(make([]byte, 1))
	}
	p.Seconds = time.Since(start).Seconds()
	if p.Outcome = outcomeOf(err, "answered"); p.Outcome == "timeout" {
		p.Outcome, p.Note = "no answer", "many servers don't answer what they don't understand, so this says little"
	}
	local = c.LocalAddr().(*net.UDPAddr).AddrPort()
	return local, read(local)
}

func outcomeOf(err error, good string) string {
	var timeout net.Error
	switch {
	case err == nil:
		return good
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET):
		return "refused"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	}
	return "unreachable"
}

// freePort is a port that no socket has now.
func freePort(from, to netip.Addr) (uint16, error) {
	if !from.IsValid() {
		from = netip.IPv4Unspecified()
		if to.Is6() {
			from = netip.IPv6Unspecified()
		}
	}
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)))
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port(), nil
}

func reuseAddress(_, _ string, c syscall.RawConn) error { return control(c, unix.SO_REUSEADDR, 1) }

// control sets an option of a socket.
func control(c syscall.RawConn, option, value int) (err error) {
	if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, option, value) }); e != nil {
		return e
	}
	return err
}

// flowsOf lists the probe's own entries. Of the connection that userspace makes
// for it nothing tells which of all to that endpoint it is.
func (t *tracer) flowsOf(c *conntrack.Client, local netip.AddrPort, p *Probe) []conntrack.Flow {
	p.Endpoint = t.endpointOfProbe(local)
	if c == nil {
		return nil
	}
	all, err := c.List(t.req.Protocol)
	if err != nil {
		p.Note = "conntrack can't be read: " + err.Error()
		return nil
	}
	return flowsBetween(all, local, t.req.Address)
}

// flowsBetween are those that began from one address and port to another.
func flowsBetween(all []conntrack.Flow, from, to netip.AddrPort) []conntrack.Flow {
	return slices.DeleteFunc(all, func(f conntrack.Flow) bool { return f.OrigSrc != from || f.OrigDst != to })
}

// endpointOf is the endpoint that an entry leads to; invalid where it is kproxy's
// own listener.
func endpointOf(f *conntrack.Flow, r *Result) netip.AddrPort {
	for _, c := range r.Candidates {
		if c.Endpoint == f.ReplySrc {
			return c.Endpoint
		}
	}
	return netip.AddrPort{}
}

// flowText prints an entry as conntrack -L does, without what varies.
func flowText(f *conntrack.Flow) string {
	side := func(src, dst netip.AddrPort) string {
		return fmt.Sprintf("src=%s dst=%s sport=%d dport=%d", src.Addr(), dst.Addr(), src.Port(), dst.Port())
	}
	text := f.Protocol.String() + " " + side(f.OrigSrc, f.OrigDst)
	if !f.Answered() {
		text += " [UNREPLIED]"
	}
	text += " " + side(f.ReplySrc, f.ReplyDst)
	if f.Mark != 0 {
		text += fmt.Sprintf(" mark=%d", f.Mark)
	}
	return text
}

// checkProbe compares the probe with the prediction, and finds the endpoints that don't
// answer.
func (t *tracer) checkProbe(ctx context.Context, r *Result) {
	p := r.Probe
	good := p.Outcome == "connected" || p.Outcome == "answered"
	switch {
	case good && r.Verdict == Undetermined && p.Endpoint.IsValid():
		r.Verdict = Forwarded
	case good && (r.Verdict == Refused || r.Verdict == Dropped):
		r.note(SeverityWarning, fmt.Sprintf("the probe was %s although the packet should have been %s", p.Outcome, r.Verdict), "probe", "trace again: something may have changed meanwhile")
	}
	dead, asked := 0, 0
	if t.req.Protocol == service.TCP {
		dead, asked = t.probeEndpoints(ctx, r)
	}
	// One that fails where some endpoints are dead has met one of them.
	if !good && p.Outcome != "no answer" && r.Verdict == Forwarded && (dead == 0 || dead == asked) {
		r.Verdict = Dropped
		if p.Outcome == "refused" {
			r.Verdict = Refused
		}
		if dead == 0 {
			r.note(SeverityError, "the probe failed although nothing that is seen stops it: "+p.Outcome, "probe", "look at the endpoints' own firewall, and at what netfilter doesn't show (eBPF)")
		}
	}
	r.Culprit = culprit(r)
}

func (r *Result) note(severity, what, where, remedy string) {
	r.Findings = append(r.Findings, Finding{severity, what, where, remedy})
	r.sortFindings()
}

// probeEndpoints connects to each endpoint that may be chosen, and returns how many
// of how many don't take that.
func (t *tracer) probeEndpoints(ctx context.Context, r *Result) (dead, asked int) {
	failed := make([]error, len(r.Candidates))
	own, err := os.Open(ownSpace)
	if err != nil {
		r.note(SeverityWarning, "endpoints can't be probed: "+err.Error(), "probe", "")
		return 0, 0
	}
	defer own.Close()
	here := fmt.Sprintf("/proc/self/fd/%d", own.Fd())
	dialer := net.Dialer{Timeout: probeTimeout, Control: func(_, _ string, c syscall.RawConn) error {
		if t.proxy == nil {
			return nil
		}
		return control(c, unix.SO_MARK, int(t.proxy.Marks.Own())) // kproxy's rules leave its own connections alone
	}}
	var wg errgroup.Group
	wg.SetLimit(probesAtOnce)
	for i := range r.Candidates {
		if r.Candidates[i].Probability == 0 || i >= maxLegs {
			continue
		}
		asked++
		wg.Go(func() error {
			failed[i] = inside(here, func() error {
				c, err := dialer.DialContext(ctx, "tcp", r.Candidates[i].Endpoint.String())
				if err == nil {
					c.Close()
				}
				return err
			})
			return nil
		})
	}
	_ = wg.Wait()
	for i, err := range failed {
		if err == nil {
			continue
		}
		dead++
		if op := (*net.OpError)(nil); errors.As(err, &op) {
			err = op.Err
		}
		c := &r.Candidates[i]
		c.Why = "doesn't take a connection from this node: " + err.Error()
		what := fmt.Sprintf("endpoint %s is dead: it doesn't take a connection from this node (%v), and gets %s of new connections", c.Endpoint, err, percent(c.Probability))
		if r.Probe != nil && t.forecast != nil {
			what += "; userspace tries another endpoint then"
		}
		r.note(SeverityError, what, "endpoint "+c.Endpoint.String(), "look at the pod and whether it listens on its port")
	}
	return dead, asked
}
