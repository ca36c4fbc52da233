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

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/conntrack"
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
	for _, fd := range p.files {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
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

// End asks the predecessor to end.
func (p *Predecessor) End() error { return p.tell(handover.End) }

// tell asks for a step that has no answer.
func (p *Predecessor) tell(step handover.Step) error {
	if err := p.conn.Send(AnswerBound, &handover.Ask{Step: step}); err != nil {
		return fmt.Errorf("%w: %w", ErrNotTakenOver, err)
	}
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

// Confirm tells the predecessor that all of it is here. Once this is sent it can't but let go, also where it hangs: nothing else decides.
func (p *Predecessor) Confirm() error {
	err := p.tell(handover.Confirm)
	p.over = err == nil
	return err
}
