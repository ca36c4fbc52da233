package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// ErrNotTakenOver is the end of an Agent that was to take over from another one, which goes on, ends, or has died. Another
// Agent may begin where that has ended.
var ErrNotTakenOver = errors.New("take over from the kproxy that runs")

// Predecessor is the kproxy that this one takes over from. One goroutine uses it.
type Predecessor struct {
	conn    *handover.Conn
	welcome *handover.Welcome
	files   []int // -1 for what is taken
	over    bool  // the predecessor has nothing any more

	kernel  map[service.Key]conntrack.ServiceFigures // what that had counted
	History []byte                                   // of its dashboard; set when this process has taken over
}

// Succeed asks the kproxy at the other end of conn whether this one may take over. It takes conn over.
func Succeed(conn *handover.Conn) (*Predecessor, error) {
	p := &Predecessor{conn: conn, welcome: &handover.Welcome{}}
	ns, err := node.Namespace()
	if err == nil {
		err = conn.Send(answerBound, &handover.Hello{Version: handover.Version, Network: ns})
	}
	if err == nil {
		p.files, err = conn.Receive(answerBound, p.welcome)
		if errors.Is(err, io.EOF) {
			err = fmt.Errorf("%w: it hasn't begun, or is of a version that doesn't understand this one", err)
		}
	}
	if err == nil && p.welcome.Refused != "" {
		err = errors.New(p.welcome.Refused)
	}
	if err != nil {
		p.Close()
		return nil, fmt.Errorf("%w: %w", ErrNotTakenOver, err)
	}
	return p, nil
}

// File returns the descriptor that has a name, once: the caller closes it.
func (p *Predecessor) File(name string) (fd int, found bool) {
	if p == nil {
		return -1, false
	}
	for _, f := range p.welcome.Files {
		if i := int(f.File) - 1; f.Name == name && i >= 0 && i < len(p.files) && p.files[i] >= 0 {
			fd, p.files[i] = p.files[i], -1
			return fd, true
		}
	}
	return -1, false
}

// Listener returns the listener that has a name; nil if there is none.
func (p *Predecessor) Listener(name string) (net.Listener, error) {
	fd, found := p.File(name)
	if !found {
		return nil, nil
	}
	return handover.FileListener(fd, name)
}

func (p *Predecessor) interrupt() { p.conn.Close() }

// Close gives up what wasn't taken, and the conversation unless the predecessor has ended it: that
// learns from its end that this process has ended.
func (p *Predecessor) Close() {
	for _, fd := range p.files {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	p.files = nil
	p.conn.Close()
}

// pending reports whether the predecessor serves still.
func (p *Predecessor) pending() bool { return p != nil && !p.over }

func (p *Predecessor) nodeLock() (*os.File, error) {
	path, err := node.LockPath()
	if err != nil {
		return nil, err
	}
	fd, found := p.File(nodeLock)
	if !found {
		return nil, fmt.Errorf("%w: it didn't pass on the node's lock", ErrNotTakenOver)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// ask asks for a step, and receives the answer, in which the predecessor may have refused.
func (p *Predecessor) ask(step handover.Step, within time.Duration, answer handover.Message, refused *string) (files []int, err error) {
	if err = p.conn.Send(answerBound, &handover.Ask{Step: step}); err == nil {
		files, err = p.conn.Receive(within, answer)
	}
	if err == nil && *refused != "" {
		handover.CloseFiles(files)
		err = errors.New(*refused)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotTakenOver, err)
	}
	return files, nil
}

// leave ends an Agent that hasn't served.
func (a *Agent) leave(err error) error {
	if a.from.pending() && a.userspace != nil {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		_ = a.userspace.Drain(now)
	}
	return err
}

// inherit listens with the predecessor's listeners. Where its rules are made for something else, so that both can't
// be one after the other without a moment between, it is asked to end.
func (a *Agent) inherit() error {
	w := a.from.welcome
	tcp, udp := uint16(w.TCPPort), uint16(w.UDPPort)
	if p := uint16(a.cfg.ListenTCPPort); p != 0 {
		tcp = p
	}
	if p := uint16(a.cfg.ListenUDPPort); p != 0 {
		udp = p
	}
	if want := a.madeFor(tcp, udp); w.Steering != want {
		if err := a.from.conn.Send(answerBound, &handover.Ask{Step: handover.End}); err != nil {
			return fmt.Errorf("%w: %w", ErrNotTakenOver, err)
		}
		return fmt.Errorf("%w: its rules are for %s, these for %s; it was asked to end", ErrNotTakenOver, w.Steering, want)
	}
	n := 0
	for _, l := range w.Listeners {
		n += len(l.Files)
	}
	if n > len(a.from.files) {
		return fmt.Errorf("%w: %d descriptors of listeners, and %d in all", ErrNotTakenOver, n, len(a.from.files))
	}
	files := a.from.files[:n:n] // the listeners' come first
	own := make([]int, n)
	for i := range files {
		own[i], files[i] = files[i], -1
	}
	return a.userspace.Inherit(w.Listeners, own)
}

// pausePredecessor has the predecessor leave the kernel alone from now on, and takes what it knows of endpoints.
func (a *Agent) pausePredecessor() error {
	var paused handover.Paused
	files, err := a.from.ask(handover.Pause, pauseBound, &paused, &paused.Refused)
	if err != nil {
		return err
	}
	a.healths.Inherit(paused.Files, files)
	a.from.kernel, a.from.History = countersIn(paused.Kernel), paused.History
	a.prober.Resume(plan.Targets(a.source.Latest(), a.health, a.policyNow().ExcludeCIDRs...), healthIn(paused.Health))
	return a.orders.Open(a.cfg.StateDir) // it may have written some since
}

// takeOver takes what the predecessor's userspace carries; first is the first plan.
func (a *Agent) takeOver(first *plan.Plan) error {
	a.userspace.Prepare(first, plan.Between(nil, first))
	a.uncommitted = true
	resume := pauseCollector()
	defer func() {
		if a.from.pending() {
			resume()
		}
	}()
	var given handover.Given
	began := time.Now()
	files, err := a.from.ask(handover.Give, answerBound, &given, &given.Refused)
	if err != nil {
		return err
	}
	if err := a.userspace.TakeOver(&given.Userspace, files); err != nil {
		return fmt.Errorf("%w: %w", ErrNotTakenOver, err)
	}
	a.userspace.Confirm() // first: a crash right after CONFIRM would leave nothing to go on with
	// Once this is sent the predecessor can't but let go, also where it hangs: nothing else decides.
	if err := a.from.conn.Send(answerBound, &handover.Ask{Step: handover.Confirm}); err != nil {
		return fmt.Errorf("%w: %w", ErrNotTakenOver, err)
	}
	a.from.over = true
	a.serves = func() {
		resume()
		a.log.Info("took over from the kproxy that ran", "connections were at rest for", time.Since(began).Round(time.Microsecond).String(), "descriptors", len(files))
	}
	if err := node.WritePID(a.lock); err != nil {
		a.log.Warn("the node's lock names the process that ran before", "error", err)
	}
	a.programmer.steeringReady() // the rules are the predecessor's
	a.tookOver()
	return nil
}

// healthOut returns what v knows, for a successor.
func healthOut(v *health.View) (out []handover.Health) {
	for t, s := range v.States() {
		h := handover.Health{
			Protocol: uint32(t.Protocol), Kind: string(t.Check.Kind), Path: t.Check.Path, Port: uint32(t.Check.Port),
			Status: uint32(s.Status), Since: s.Since.UnixNano(), LastError: s.LastError,
		}
		h.Address = handover.Packed(t.Address)
		for _, at := range s.Flaps {
			h.Flaps = append(h.Flaps, at.UnixNano())
		}
		out = append(out, h)
	}
	return out
}

// healthIn returns what a predecessor's healthOut said.
func healthIn(in []handover.Health) map[health.Target]health.State {
	out := make(map[health.Target]health.State, len(in))
	for _, h := range in {
		t := health.Target{
			Protocol: service.Protocol(h.Protocol), Address: handover.Unpacked(h.Address),
			Check: service.HealthCheck{Kind: service.Check(h.Kind), Path: h.Path, Port: uint16(h.Port)},
		}
		if h.Status > uint32(health.Down) {
			continue // of a later release
		}
		s := health.State{Status: health.Status(h.Status), Since: time.Unix(0, h.Since), LastError: h.LastError}
		for _, at := range h.Flaps {
			s.Flaps = append(s.Flaps, time.Unix(0, at))
		}
		out[t] = s
	}
	return out
}

// countersOut returns what the kernel's data planes have counted, for a successor.
func countersOut(figures map[service.Key]conntrack.ServiceFigures) (out []handover.Service) {
	counters := func(f conntrack.Figures) handover.Counters {
		return handover.Counters{Total: f.Total, Failed: f.Failed, BytesIn: f.BytesIn, BytesOut: f.BytesOut}
	}
	for k, s := range figures {
		row := handover.Service{Namespace: k.Namespace, Name: k.Name, Port: k.Port, Protocol: uint32(k.Protocol), Counters: counters(s.Figures)}
		for address, f := range s.Endpoints {
			row.Endpoints = append(row.Endpoints, handover.Endpoint{Address: handover.Packed(address), Counters: counters(f)})
		}
		out = append(out, row)
	}
	return out
}

// countersIn returns what a predecessor's countersOut said.
func countersIn(in []handover.Service) map[service.Key]conntrack.ServiceFigures {
	figures := func(c handover.Counters) conntrack.Figures {
		return conntrack.Figures{Total: c.Total, Failed: c.Failed, BytesIn: c.BytesIn, BytesOut: c.BytesOut}
	}
	out := make(map[service.Key]conntrack.ServiceFigures, len(in))
	for _, row := range in {
		s := conntrack.ServiceFigures{Figures: figures(row.Counters), Endpoints: map[netip.AddrPort]conntrack.Figures{}}
		for _, e := range row.Endpoints {
			s.Endpoints[handover.Unpacked(e.Address)] = figures(e.Counters)
		}
		out[service.Key{Namespace: row.Namespace, Name: row.Name, Port: row.Port, Protocol: service.Protocol(row.Protocol)}] = s
	}
	return out
}
