package takeover

import (
	"errors"
	"fmt"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/userspace/handover"
)

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
