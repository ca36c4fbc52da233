// Package takeover is the conversation in which a kproxy takes over from another one, on both sides: userspace/handover has its messages,
// the Agent what they are about. One goroutine has a conversation.
package takeover

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// ErrNotTakenOver is the end of an Agent that was to take over from another one, which goes on, ends, or has died. Another
// Agent may begin where that has ended.
var ErrNotTakenOver = errors.New("take over from the kproxy that runs")

// Predecessor is the kproxy that this one takes over from. One goroutine uses it.
type Predecessor struct {
	Welcome *handover.Welcome
	conn    *handover.Conn
	files   []int // -1 for what is taken
	over    bool  // the predecessor has nothing any more

	Kernel  map[service.Key]conntrack.ServiceFigures // what that had counted
	History []byte                                   // of its dashboard; set when this process has taken over
}

// Succeed asks the kproxy at the other end of conn whether this one may take over. It takes conn over.
func Succeed(conn *handover.Conn) (*Predecessor, error) {
	p := &Predecessor{conn: conn, Welcome: &handover.Welcome{}}
	ns, err := node.Namespace()
	if err == nil {
		err = conn.Send(AnswerBound, &handover.Hello{Version: handover.Version, Network: ns})
	}
	if err == nil {
		p.files, err = conn.Receive(AnswerBound, p.Welcome)
		if errors.Is(err, io.EOF) {
			err = fmt.Errorf("%w: it hasn't begun, or is of a version that doesn't understand this one", err)
		}
	}
	if err == nil && p.Welcome.Refused != "" {
		err = errors.New(p.Welcome.Refused)
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
	for _, f := range p.Welcome.Files {
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

// Interrupt has whatever waits for the predecessor fail.
func (p *Predecessor) Interrupt() { p.conn.Close() }

// Close gives up what wasn't taken, and the conversation unless the predecessor has ended it: that
// learns from its end that this process has ended.
func (p *Predecessor) Close() {
	handover.CloseFiles(p.files)
	p.files = nil
	p.conn.Close()
}

// Pending reports whether the predecessor serves still.
func (p *Predecessor) Pending() bool { return p != nil && !p.over }

// NodeLock returns the lock that [node.Lock] took for the predecessor.
func (p *Predecessor) NodeLock() (*os.File, error) {
	path, err := node.LockPath()
	if err != nil {
		return nil, err
	}
	fd, found := p.File(LockName)
	if !found {
		return nil, fmt.Errorf("%w: it didn't pass on the node's lock", ErrNotTakenOver)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// ask asks for a step, and receives the answer, in which the predecessor may have refused.
func (p *Predecessor) ask(step handover.Step, within time.Duration, answer handover.Message, refused *string) (files []int, err error) {
	if err = p.conn.Send(AnswerBound, &handover.Ask{Step: step}); err == nil {
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

// Tell asks for a step that has no answer. Once Confirm is sent the predecessor can't but let go, also where it hangs: nothing else decides.
func (p *Predecessor) Tell(step handover.Step) error {
	if err := p.conn.Send(AnswerBound, &handover.Ask{Step: step}); err != nil {
		return fmt.Errorf("%w: %w", ErrNotTakenOver, err)
	}
	p.over = step == handover.Confirm
	return nil
}

// Listeners returns the descriptors of userspace's listeners, which are the caller's then.
func (p *Predecessor) Listeners() ([]int, error) {
	n := 0
	for _, l := range p.Welcome.Listeners {
		n += len(l.Files)
	}
	if n > len(p.files) {
		return nil, fmt.Errorf("%w: %d descriptors of listeners, and %d in all", ErrNotTakenOver, n, len(p.files))
	}
	files := p.files[:n:n] // the listeners' come first
	own := make([]int, n)
	for i := range files {
		own[i], files[i] = files[i], -1
	}
	return own, nil
}

// Pause has the predecessor leave the kernel alone from now on, and returns what it knows.
func (p *Predecessor) Pause() (paused handover.Paused, files []int, err error) {
	if files, err = p.ask(handover.Pause, PauseBound, &paused, &paused.Refused); err == nil {
		p.Kernel, p.History = countersIn(paused.Kernel), paused.History
	}
	return paused, files, err
}

// Give has the predecessor give what its userspace carries.
func (p *Predecessor) Give() (given handover.Given, files []int, err error) {
	files, err = p.ask(handover.Give, AnswerBound, &given, &given.Refused)
	return given, files, err
}

// HealthOut returns what v knows, for a successor.
func HealthOut(v *health.View) (out []handover.Health) {
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

// HealthIn returns what a predecessor's HealthOut said.
func HealthIn(in []handover.Health) map[health.Target]health.State {
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

// CountersOut returns what the kernel's data planes have counted, for a successor.
func CountersOut(figures map[service.Key]conntrack.ServiceFigures) (out []handover.Service) {
	counters := func(f conntrack.Figures) handover.Counters {
		return handover.Counters{Total: f.Total, Failed: f.Failed, BytesIn: f.BytesIn, BytesOut: f.BytesOut}
	}
	for k, s := range figures {
		row := handover.Service{Namespace: k.Namespace, Name: k.Name, Port: k.Port, Protocol: uint32(k.Protocol), Counters: counters(s.Figures)}
		for _, e := range s.Endpoints {
			row.Endpoints = append(row.Endpoints, handover.Endpoint{Address: handover.Packed(e.Address), Counters: counters(e.Figures)})
		}
		out = append(out, row)
	}
	return out
}

// countersIn returns what a predecessor's CountersOut said.
func countersIn(in []handover.Service) map[service.Key]conntrack.ServiceFigures {
	figures := func(c handover.Counters) conntrack.Figures {
		return conntrack.Figures{Total: c.Total, Failed: c.Failed, BytesIn: c.BytesIn, BytesOut: c.BytesOut}
	}
	out := make(map[service.Key]conntrack.ServiceFigures, len(in))
	for _, row := range in {
		s := conntrack.ServiceFigures{Figures: figures(row.Counters)}
		for _, e := range row.Endpoints {
			s.Endpoints = append(s.Endpoints, conntrack.EndpointFigures{Address: handover.Unpacked(e.Address), Figures: figures(e.Counters)})
		}
		out[service.Key{Namespace: row.Namespace, Name: row.Name, Port: row.Port, Protocol: service.Protocol(row.Protocol)}] = s
	}
	return out
}

// How long each side waits for the other. Until userspace is frozen, no client waits for it.
const (
	AnswerBound  = 5 * time.Second // for an answer that takes no work
	PrepareBound = 5 * time.Minute // until the successor has read its services
	PauseBound   = time.Minute     // until a pass has ended, and until the successor has read the kernel's rules
)

// File is a descriptor that a successor gets, and what it names it by.
type File struct {
	Name string
	FD   int
}

// LockName is the name by which a successor gets the node's lock.
const LockName = "lock node"

// Belongings holds what a successor gets that isn't the Agent's.
type Belongings struct {
	Files    []File        // which stay the caller's
	History  func() []byte // of the dashboard
	Relieved func()        // called when they are the successor's; Run returns soon after
}

// Successor is the kproxy that takes over, in conversation with this one.
type Successor struct{ *handover.Conn }

// Refuse tells the successor why it can't take over.
func (s Successor) Refuse(answer handover.Message, why string) error {
	return errors.Join(errors.New(why), s.Send(AnswerBound, answer))
}

// Unwilling says why hello's sender can't take over; empty if it can.
func Unwilling(hello *handover.Hello) string {
	own, err := node.Namespace()
	switch {
	case err != nil:
		return err.Error()
	case hello.Version != handover.Version:
		return fmt.Sprintf("it speaks version %d of the way to take over, this one version %d", hello.Version, handover.Version)
	case hello.Network != own:
		return "it is in another network namespace"
	}
	return ""
}

// Asked receives what the successor asks for next.
func (s Successor) Asked(within time.Duration) (handover.Step, error) {
	var ask handover.Ask
	_, err := s.Receive(within, &ask)
	return ask.Step, err
}
