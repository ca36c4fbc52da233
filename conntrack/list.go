package conntrack

import (
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// dumpAttempts bounds how often a dump that the kernel interrupted is begun anew.
const dumpAttempts = 5

var errInterrupted = errors.New("the table changed under the dump")

// List returns all entries of both families; p, if it isn't 0, limits it to a
// protocol. Entries that come or go meanwhile may be missing.
func (c *Client) List(p service.Protocol) ([]Flow, error) {
	var out []Flow
	for _, family := range service.Families {
		flows, err := c.list(family, p)
		if err != nil {
			return nil, fmt.Errorf("list %s conntrack entries: %w", family, err)
		}
		out = append(out, flows...)
	}
	return out, nil
}

// list retries what the kernel interrupts. If it keeps doing so, the last
// attempt is used as it is: an entry too few now is better than none ever.
func (c *Client) list(f service.Family, p service.Protocol) ([]Flow, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	filter := p
	for attempt := 1; ; attempt++ {
		flows, err := c.dump(f, filter, p)
		switch {
		case err == nil:
			return flows, nil
		case filter != 0 && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)):
			filter = 0 // a kernel that knows the attribute, but not this use of it
		case !errors.Is(err, errInterrupted) && !errors.Is(err, unix.EINTR):
			return nil, err
		case attempt >= dumpAttempts:
			return flows, nil
		}
	}
}

// dump lists once. With errInterrupted it returns what it has got.
func (c *Client) dump(f service.Family, filter, p service.Protocol) ([]Flow, error) {
	sent, err := c.dumper.Send(dumpRequest(f, filter))
	if err != nil {
		return nil, err
	}
	var out []Flow
	var problem error
	// To the end even after a problem, or the rest would look like the answer
	// to the next request.
	for m, err := range c.dumper.ReceiveIter() {
		if err != nil {
			return out, err
		}
		if m.Header.Sequence != sent.Header.Sequence || m.Header.Type != messageNew {
			continue
		}
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			problem = errInterrupted
		}
		flow, err := decode(m.Data)
		if err != nil {
			problem = err
			continue
		}
		if p == 0 || flow.Protocol == p {
			out = append(out, flow)
		}
	}
	return out, problem
}
