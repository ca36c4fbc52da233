package conntrack

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// dumpAttempts bounds how often a dump that the kernel interrupted is begun anew.
const dumpAttempts = 5

// Wanted says which flows a list has. Its zero value is all.
type Wanted struct {
	Protocol   service.Protocol // 0: all
	Unanswered bool             // only flows of which no packet has come back
	From       netip.AddrPort   // if valid, only flows whose answers come from there; it wants a Protocol
}

func (w Wanted) takes(f *Flow) bool {
	return (w.Protocol == 0 || f.Protocol == w.Protocol) && !(w.Unanswered && f.Answered()) && (!w.From.IsValid() || f.ReplySrc == w.From)
}

// few is how many entries cost no more to hand over, 3.7 µs each where it was measured, than going through the kernel's table
// once more: 13 ms there, with 262,144 buckets, however few have an entry.
const few = 3000

// shortTable reports whether the table has few entries. Nothing but speed depends on it: it may be asked of another namespace.
func shortTable() bool {
	count, _, err := Use()
	return err == nil && count <= few
}

// walk describes one list that the kernel makes.
type walk struct {
	family byte     // of protocols; AF_UNSPEC for all
	filter Wanted   // what it hands over, where it knows such a filter
	takes  []Wanted // what of that is used; all if empty
}

// List returns the entries of both families that are wanted, each once if no two wants have it; all of them if nothing says which.
// Entries that come or go meanwhile may be missing. A list of everything takes a second of CPU with some hundred thousand
// entries, most of it to hand them over, so only those that are wanted are handed over if there are many.
func (c *Client) List(which ...Wanted) (out []Flow, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("list conntrack entries: %w", fs.ErrClosed)
	}
	each := walks(which)
	if len(each) != 1 && (len(each) == 0 || shortTable()) {
		each = []walk{{family: unix.AF_UNSPEC, takes: which}}
	}
	for _, w := range each {
		if out, err = c.list(out, w); err != nil {
			return nil, fmt.Errorf("list conntrack entries: %w", err)
		}
	}
	return out, nil
}

// walks returns those by which the kernel hands over no more than what is wanted. It takes the filter of a protocol for no more than
// one family (ctnetlink_parse_tuple_filter in net/netfilter/nf_conntrack_netlink.c).
func walks(which []Wanted) (out []walk) {
	for _, w := range which {
		families := []byte{unix.AF_UNSPEC}
		switch {
		case w.From.IsValid():
			families = []byte{service.FamilyOf(w.From.Addr()).Number()}
		case w.Protocol != 0 && !w.Unanswered:
			families = []byte{unix.AF_INET, unix.AF_INET6}
		}
		for _, f := range families {
			out = append(out, walk{f, w, []Wanted{w}})
		}
	}
	return out
}

// list retries what the kernel interrupts. If it keeps doing so, the last
// attempt is used as it is: an entry too few now is better than none ever.
func (c *Client) list(out []Flow, w walk) ([]Flow, error) {
	for attempt := 1; ; attempt++ {
		flows, err := c.dump(out, w)
		switch {
		case err == nil:
			return flows, nil
		case w.filter != (Wanted{}) && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)):
			w.filter = Wanted{} // a kernel that knows the attribute, but not this use of it
		case !errors.Is(err, netlink.ErrInterrupted) && !errors.Is(err, unix.EINTR):
			return nil, err
		case attempt >= dumpAttempts:
			return flows, nil
		}
	}
}

// dump appends what one list has; also what it got before an error.
func (c *Client) dump(out []Flow, w walk) ([]Flow, error) {
	var problem error
	err := c.dumper.Dump(func(b []byte) []byte { return appendDump(b, w.family, w.filter) }, func(body []byte) {
		flow, err := decode(body)
		if err != nil {
			problem = err
		} else if len(w.takes) == 0 || slices.ContainsFunc(w.takes, func(t Wanted) bool { return t.takes(&flow) }) {
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
	err = s.DumpWhile(func(b []byte) []byte { return appendDump(b, unix.AF_UNSPEC, Wanted{}) }, func(body []byte) bool {
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
