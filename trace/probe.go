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

const (
	// probeTimeout is how long a probe waits for a connection, or for the answer to a datagram.
	probeTimeout = 3 * time.Second
	probesAtOnce = 16
)

// probe makes one connection and closes it, or sends one datagram, from where the
// client is, and reads its conntrack entry while the socket is still open.
func (t *tracer) probe(ctx context.Context, r *Result) *Probe {
	p := &Probe{Conntrack: []string{}, From: "this node itself, whose packets take another way than those of pods and other hosts"}
	if t.req.Netns != "" {
		p.From = "network namespace " + t.req.Netns
	}
	start := time.Now()
	c, local, err := t.dial(ctx)
	good := "connected"
	switch {
	case err != nil:
		p.Note = err.Error()
	case t.req.Protocol == service.UDP:
		defer c.Close()
		good = "answered"
		if _, err = c.Write([]byte("kproxy trace\n")); err == nil {
			c.SetReadDeadline(time.Now().Add(probeTimeout))
			_, err = c.Read(make([]byte, 1))
		}
	default:
		defer c.Close()
	}
	p.Seconds = time.Since(start).Seconds()
	if p.Outcome = outcomeOf(err, good); p.Outcome == "timeout" && good == "answered" {
		p.Outcome, p.Note = "no answer", "many servers don't answer what they don't understand, so this says little"
	}
	if p.Outcome == "connected" && t.forecast != nil {
		t.awaitEndpoint(c, local, p, r)
	}
	if p.Outcome == "connected" && r.Verdict != Forwarded {
		if whose := t.halfOpen(ctx, c, local); whose != "" {
			p.Outcome, p.Note = "timeout", whose+" handshake begins and doesn't end: the answer comes again, so that what was sent then got lost"
		}
	}
	if local.Port() > 0 {
		t.readFlows(p, local, r)
	}
	return p
}

// handshake is how long the packet that completes a handshake may be on its way: answers are repeated after a second (RFC 6298).
const handshake = 1500 * time.Millisecond

// halfOpen says whose connection's other side hasn't got the packet that completes the handshake: the probe's, or of what userspace
// carries, one like kproxy's to the endpoint, which the probe's tells nothing of. It returns "" if both have.
func (t *tracer) halfOpen(ctx context.Context, c net.Conn, local netip.AddrPort) string {
	var onward net.Conn
	if endpoint := t.endpointOfProbe(local); endpoint.IsValid() {
		if x, err := t.ownDialer().DialContext(ctx, "tcp", endpoint.String()); err == nil { // else nothing more is known
			defer x.Close()
			onward = x
		}
	}
	time.Sleep(handshake)
	switch {
	case repeated(c):
		return "its"
	case onward != nil && repeated(onward):
		return "kproxy's"
	}
	return ""
}

// repeated reports whether a connection's other side repeats its answer to the first packet, so that it hasn't got the next one.
func repeated(c net.Conn) (again bool) {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err == nil {
		_ = onSocket(raw, func(fd int) error { // where the kernel doesn't say, nothing is known of it
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			again = err == nil && info.Segs_in > 1 && info.Data_segs_in == 0
			return err
		})
	}
	return again
}

// dial connects from where the client is. The address that it returns is known also where the
// connection fails, so that its entry can be told from others'; without a port it has none.
func (t *tracer) dial(ctx context.Context) (c net.Conn, local netip.AddrPort, err error) {
	d := net.Dialer{Timeout: probeTimeout, Control: func(_, _ string, socket syscall.RawConn) error {
		return onSocket(socket, func(fd int) (err error) {
			local, err = bind(fd, t.req.From, t.req.Address.Addr().Is6())
			return err
		})
	}}
	dial := func() (err error) {
		c, err = d.DialContext(ctx, t.req.Protocol.String(), t.req.Address.String())
		return err
	}
	if t.req.Netns == "" {
		err = dial()
	} else {
		err = inside(t.req.Netns, dial)
	}
	switch {
	case err == nil:
		local = netip.MustParseAddrPort(c.LocalAddr().String())
	case local.Addr().IsUnspecified():
		local = netip.AddrPortFrom(t.client.Address, local.Port())
	}
	return c, local, err
}

// bind gives a socket an address, or any, and a free port.
func bind(fd int, from netip.Addr, v6 bool) (netip.AddrPort, error) {
	var at unix.Sockaddr = &unix.SockaddrInet4{}
	if v6 {
		at = &unix.SockaddrInet6{}
	}
	switch a := at.(type) {
	case *unix.SockaddrInet4:
		if from.IsValid() {
			a.Addr = from.As4()
		}
	case *unix.SockaddrInet6:
		if from.IsValid() {
			a.Addr = from.As16()
		}
	}
	if err := unix.Bind(fd, at); err != nil {
		return netip.AddrPort{}, os.NewSyscallError("bind", err)
	}
	at, err := unix.Getsockname(fd)
	switch a := at.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), err
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), err
	}
	return netip.AddrPort{}, err
}

// onSocket runs f on a socket's file descriptor.
func onSocket(c syscall.RawConn, f func(fd int) error) (err error) {
	if e := c.Control(func(fd uintptr) { err = f(int(fd)) }); e != nil {
		return e
	}
	return err
}

// readFlows reads the probe's own entries. Of the connection that userspace makes
// for it nothing tells which of all to that endpoint it is.
func (t *tracer) readFlows(p *Probe, local netip.AddrPort, r *Result) {
	p.Endpoint = t.endpointOfProbe(local)
	all, err := listFlows(t.req.Protocol)
	if err != nil {
		p.Note = "conntrack can't be read: " + err.Error()
	}
	for _, f := range flowsBetween(all, local, t.req.Address) {
		p.Conntrack = append(p.Conntrack, flowText(&f))
		// Of what kproxy's own listener gets, the endpoint isn't in the entry.
		if r.leads(f) && p.Outcome != "timeout" && p.Outcome != "unreachable" {
			p.Endpoint = f.ReplySrc
		}
	}
	if len(p.Conntrack) == 0 && p.Note == "" {
		p.Note = "conntrack has no entry of it"
	}
}

func listFlows(proto service.Protocol) ([]conntrack.Flow, error) {
	c, err := conntrack.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.List(conntrack.Wanted{Protocol: proto})
}

// leads reports whether the kernel leads a flow to an endpoint.
func (r *Result) leads(f conntrack.Flow) bool {
	return slices.ContainsFunc(r.Candidates, func(c Candidate) bool { return c.Endpoint == f.ReplySrc })
}

// gaveUp is the note of a probe that userspace has refused, be it that endpoints refused kproxy's connections or that these got no answer.
const gaveUp = "kproxy's listener accepted it, and then kproxy found no endpoint that does"

// awaitEndpoint waits until userspace, which accepts first, has found an endpoint
// or given up.
func (t *tracer) awaitEndpoint(c net.Conn, local netip.AddrPort, p *Probe, r *Result) {
	const poll = 20 * time.Millisecond
	for end := time.Now().Add(probeTimeout); !t.endpointOfProbe(local).IsValid(); {
		if time.Now().After(end) {
			if all, _ := listFlows(t.req.Protocol); slices.ContainsFunc(flowsBetween(all, local, t.req.Address), r.leads) {
				return // the kernel served it meanwhile
			}
			p.Outcome, p.Note = "timeout", "kproxy's listener accepted it, and no endpoint has taken it yet"
			return
		}
		c.SetReadDeadline(time.Now().Add(poll))
		if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			p.Outcome, p.Note = "refused", gaveUp
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
		if x.Client == local && x.Address == t.req.Address && x.Protocol == t.req.Protocol && (x.Taken || x.Protocol == service.UDP) {
			return x.Endpoint
		}
	}
	return netip.AddrPort{}
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

// flowsBetween returns the flows that began from one address and port to another.
func flowsBetween(all []conntrack.Flow, from, to netip.AddrPort) []conntrack.Flow {
	return slices.DeleteFunc(all, func(f conntrack.Flow) bool { return f.OrigSrc != from || f.OrigDst != to })
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
	p.Says = says(r)
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

// says tells whether what became of a probe is what is foretold.
func says(r *Result) string {
	p := r.Probe
	good := p.Outcome == "connected" || p.Outcome == "answered"
	confirms := map[Verdict][]string{
		Forwarded: {"connected", "answered"}, Dropped: {"timeout", "no answer"}, Refused: {"refused", "unreachable"},
	}[r.Verdict]
	switch {
	case slices.Contains(confirms, p.Outcome), r.Verdict == Dropped && p.Note == gaveUp:
		return "confirms that the packet is " + string(r.Verdict)
	case r.Verdict == Undetermined && good:
		return "decides that the packet is " + string(Forwarded)
	case r.Verdict == Undetermined || r.Verdict == NotAService:
		return "doesn't decide what became of the packet"
	case r.Verdict == Forwarded && p.Outcome == "no answer":
		return "doesn't contradict that the packet is forwarded"
	case r.Verdict == Forwarded && r.Culprit != "":
		return "confirms that not all connections succeed"
	case good && r.Verdict != Forwarded && r.Protocol == service.TCP:
		return "contradicts that the packet is " + string(r.Verdict) + ", as far as a connection without data tells"
	}
	return "contradicts that the packet is " + string(r.Verdict)
}

func (r *Result) note(severity, what, where, remedy string) {
	r.Findings = append(r.Findings, Finding{severity, what, where, remedy})
	r.sortFindings()
}

// ownDialer makes connections that kproxy's rules take for its own, and leave alone.
func (t *tracer) ownDialer() *net.Dialer {
	return &net.Dialer{Timeout: probeTimeout, Control: func(_, _ string, c syscall.RawConn) error {
		if t.proxy == nil {
			return nil
		}
		return onSocket(c, func(fd int) error {
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(t.proxy.Marks.Own()))
		})
	}}
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
	dialer := t.ownDialer()
	var wg errgroup.Group
	wg.SetLimit(probesAtOnce)
	for i := range r.Candidates {
		answered := r.Probe != nil && (r.Probe.Outcome == "connected" || r.Probe.Outcome == "answered") && r.Probe.Endpoint == r.Candidates[i].Endpoint
		if r.Candidates[i].Probability == 0 || i >= maxLegs || answered { // the node's own packets may be stopped where the client's aren't
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
		if op, ok := errors.AsType[*net.OpError](err); ok {
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
