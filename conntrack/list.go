package conntrack

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// dumpAttempts bounds how often a dump that the kernel interrupted is begun anew.
const dumpAttempts = 5

// wanted says which entries a list has. Its zero value is all.
type wanted struct {
	protocol   service.Protocol // 0: all
	unanswered bool             // only flows of which no packet has come back
	from       netip.AddrPort   // if valid, only flows whose answers come from there
}

func (w wanted) takes(f *Flow) bool {
	return (w.protocol == 0 || f.Protocol == w.protocol) && !(w.unanswered && f.Answered()) && (!w.from.IsValid() || f.ReplySrc == w.from)
}

// List returns all entries of both families; p, if it isn't 0, limits it to a
// protocol. Entries that come or go meanwhile may be missing.
func (c *Client) List(p service.Protocol) ([]Flow, error) {
	return c.lists(wanted{protocol: p})
}

// ListUnanswered is List of flows of which no packet has come
// back yet. They are few: a list of everything takes a second of CPU with some hundred thousand
// entries, most of it to hand them over, and this one doesn't.
func (c *Client) ListUnanswered(p service.Protocol) ([]Flow, error) {
	return c.lists(wanted{protocol: p, unanswered: true})
}

// ListTo is List of flows to one endpoint.
func (c *Client) ListTo(p service.Protocol, endpoint netip.AddrPort) ([]Flow, error) {
	return c.lists(wanted{protocol: p, from: endpoint})
}

// lists lets the kernel go through its table once, which takes it ten milliseconds if
// there is no entry; or, where it shall hand over one protocol of many entries, once for each family,
// as it takes that filter for no more (ctnetlink_parse_tuple_filter in net/netfilter/nf_conntrack_netlink.c).
func (c *Client) lists(w wanted) (out []Flow, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("list conntrack entries: %w", fs.ErrClosed)
	}
	families := []byte{unix.AF_UNSPEC}
	switch {
	case w.from.IsValid():
		families = []byte{service.FamilyOf(w.from.Addr()).Number()}
	case w.protocol != 0 && !w.unanswered:
		families = []byte{unix.AF_INET, unix.AF_INET6}
	}
	for _, family := range families {
		if out, err = c.list(out, family, w); err != nil {
			return nil, fmt.Errorf("list conntrack entries: %w", err)
		}
	}
	return out, nil
}

// list retries what the kernel interrupts. If it keeps doing so, the last
// attempt is used as it is: an entry too few now is better than none ever.
func (c *Client) list(out []Flow, family byte, w wanted) ([]Flow, error) {
	filter := w
	for attempt := 1; ; attempt++ {
		flows, err := c.dump(out, family, filter, w)
		switch {
		case err == nil:
			return flows, nil
		case filter != (wanted{}) && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)):
			filter = wanted{} // a kernel that knows the attribute, but not this use of it
		case !errors.Is(err, netlink.ErrInterrupted) && !errors.Is(err, unix.EINTR):
			return nil, err
		case attempt >= dumpAttempts:
			return flows, nil
		}
	}
}

// dump appends what one list has; also what it got before an error.
func (c *Client) dump(out []Flow, family byte, filter, w wanted) ([]Flow, error) {
	var problem error
	err := c.dumper.Dump(func(b []byte) []byte { return appendDump(b, family, filter) }, func(body []byte) {
		flow, err := decode(body)
		if err != nil {
			problem = err
		} else if w.takes(&flow) {
			out = append(out, flow)
		}
	})
	return out, cmp.Or(problem, err)
}

// Sample returns the first entries of the table of the calling thread's network namespace, at most n of them. However long the table is,
// the kernel makes no more of the list than is read.
func Sample(n int) (out []Flow, err error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, dumpSize)
	if err != nil {
		return nil, fmt.Errorf("open conntrack socket: %w", err)
	}
	defer s.Close()
	var problem error
	err = s.DumpWhile(func(b []byte) []byte { return appendDump(b, unix.AF_UNSPEC, wanted{}) }, func(body []byte) bool {
		var f Flow
		if f, problem = decode(body); problem == nil {
			out = append(out, f)
		}
		return problem == nil && len(out) < n
	})
	if errors.Is(err, netlink.ErrInterrupted) {
		err = nil // entries that came or went meanwhile
	}
	return out, cmp.Or(problem, err)
}
