package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// ErrNotFound says that the table has no such entry.
var ErrNotFound = errors.New("no such conntrack entry")

const (
	// poolSize is how many requests are under way at a time. The kernel answers
	// within the system call, so a few are enough for any number of goroutines.
	poolSize = 4
	// answerSize holds any answer about one entry.
	answerSize = 8 << 10
	// dumpSize lets the kernel put many entries into one message: it fills up to
	// what the reader has shown to take (netlink_dump in net/netlink/af_netlink.c).
	dumpSize = 32 << 10
	// lookupsAtOnce is how many requests go in one message: their answers, of up to
	// 4 kB each as the kernel reckons (NLMSG_GOODSIZE), wait in the socket's buffer,
	// which is 208 kB by default.
	lookupsAtOnce = 32
)

// Client talks to the table of one network namespace. It is safe for
// concurrent use. Its sockets stay open: a request costs two system calls.
type Client struct {
	pool chan *requests // idle ones; closed by Close
	all  []*requests

	mu     sync.Mutex // a dump has the socket for itself
	dumper *netlink.Socket
	closed bool
}

// requests is a socket for requests about single entries, with room for answers.
type requests struct {
	*netlink.Socket
	missing [lookupsAtOnce]int
	flows   [lookupsAtOnce]Flow
	errs    [lookupsAtOnce]error
}

// Dial opens a client in the network namespace of the calling thread. It needs
// CAP_NET_ADMIN there.
func Dial() (*Client, error) {
	dumper, err := netlink.Open(unix.NETLINK_NETFILTER, dumpSize)
	if err != nil {
		return nil, fmt.Errorf("open conntrack socket: %w", err)
	}
	c := &Client{dumper: dumper, pool: make(chan *requests, poolSize)}
	for range poolSize {
		s, err := netlink.Open(unix.NETLINK_NETFILTER, answerSize)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open conntrack socket: %w", err), c.Close())
		}
		c.all = append(c.all, &requests{Socket: s})
		c.pool <- c.all[len(c.all)-1]
	}
	return c, nil
}

// Close closes the sockets, after requests under way. Later requests fail with
// [fs.ErrClosed].
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	err := c.dumper.Close()
	for range c.all {
		err = errors.Join(err, (<-c.pool).Close())
	}
	close(c.pool)
	return err
}

// do makes one request and returns the entry that the kernel answers with, if any.
func (c *Client) do(request func([]byte) []byte) (f Flow, err error) {
	s, open := <-c.pool
	if !open {
		return f, fs.ErrClosed
	}
	defer func() { c.pool <- s }()
	failed := s.Do(1, func(b []byte, _ int) []byte { return request(b) }, func(_ int, body []byte, answer error) {
		if err = answer; body != nil {
			f, err = decode(body)
		}
	})
	if failed != nil {
		err = failed
	}
	return f, err
}

// GetByReply returns the flow whose answers go from src to dst, or
// [ErrNotFound].
func (c *Client) GetByReply(p service.Protocol, src, dst netip.AddrPort) (out Flow, err error) {
	c.get(p, [][2]netip.AddrPort{{src, dst}}, func(_ int, f *Flow, failed error) { out, err = *f, failed })
	return out, err
}

// LookupAll tells where packets that a rule redirected were headed, and who sent them: the
// kernel gives a client another port when two of its flows would look alike to the listener.
// Each flow is given by where it arrives and its client; orig is where it arrives for one that
// was sent there. It calls found for each in turn, which must not call c, and waits for
// nothing but other look-ups.
func (c *Client) LookupAll(p service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	c.get(p, flows, func(i int, f *Flow, err error) { found(i, f.OrigDst, f.OrigSrc, err) })
}

// get gets flows by the source and destination of their answers, and calls found
// for each in turn. Answers that found no room in the socket are asked for again,
// as long as that helps.
func (c *Client) get(p service.Protocol, flows [][2]netip.AddrPort, found func(i int, f *Flow, err error)) {
	s, open := <-c.pool
	if !open {
		for i := range flows {
			found(i, &Flow{}, fs.ErrClosed)
		}
		return
	}
	defer func() { c.pool <- s }()
	for start := 0; start < len(flows); start += lookupsAtOnce {
		some := flows[start:min(len(flows), start+lookupsAtOnce)]
		s.get(p, some)
		for i := range some {
			err := s.errs[i]
			if errors.Is(err, unix.ENOENT) {
				err = ErrNotFound
			}
			if err != nil {
				s.flows[i], err = Flow{}, fmt.Errorf("get %s flow with reply %s > %s: %w", p, some[i][0], some[i][1], err)
			}
			found(start+i, &s.flows[i], err)
		}
	}
}

// get fills in s.flows and s.errs.
func (s *requests) get(p service.Protocol, some [][2]netip.AddrPort) {
	for i := range some {
		s.errs[i] = netlink.ErrNoAnswer
	}
	for before := len(some) + 1; ; {
		missing := s.missing[:0]
		for i := range some {
			if errors.Is(s.errs[i], netlink.ErrNoAnswer) {
				missing = append(missing, i)
			}
		}
		if len(missing) == 0 || len(missing) == before {
			return
		}
		before = len(missing)
		err := s.Do(len(missing), func(b []byte, i int) []byte {
			f := &some[missing[i]]
			return appendGet(b, p, unmap(f[0]), unmap(f[1]))
		}, func(i int, body []byte, err error) {
			i = missing[i]
			if s.errs[i] = err; body == nil {
				return
			}
			f := &s.flows[i]
			if *f, s.errs[i] = decode(body); s.errs[i] == nil && (f.ReplySrc != unmap(some[i][0]) || f.ReplyDst != unmap(some[i][1])) {
				// The kernel finds a tuple in either direction: a flow that src
				// began towards dst has it as its original.
				s.errs[i] = unix.ENOENT
			}
		})
		if err != nil && !errors.Is(err, netlink.ErrNoAnswer) {
			for _, i := range missing {
				s.errs[i] = err
			}
		}
	}
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// Delete deletes an entry, and no other. An entry that is gone already is no
// error. One with the same tuples that came after f stays, unless the kernel
// gave it the same ID.
func (c *Client) Delete(f Flow) error {
	_, err := c.do(func(b []byte) []byte { return appendDelete(b, &f) })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete conntrack entry %s: %w", f, err)
	}
	return nil
}

// DeleteUnanswered deletes the TCP entries that DNAT has led to endpoints, and of which no answer has come. The kernel does it
// in half a millisecond for each endpoint where it lists a short table in ten. It fails, before it has deleted any, where it can't
// be told of them (before Linux 6.11, and with IPv6), and where a list is as quick. The SYN of another service's client that is just
// under way to such an endpoint is sent again.
func (c *Client) DeleteUnanswered(endpoints ...netip.AddrPort) error {
	if slices.ContainsFunc(endpoints, func(a netip.AddrPort) bool { return !a.Addr().Is4() }) || len(endpoints) > 1 && !shortTable() {
		return fmt.Errorf("delete unanswered entries: %w", errors.ErrUnsupported)
	}
	for _, at := range endpoints {
		if _, err := c.do(func(b []byte) []byte { return appendDeleteUnanswered(b, at) }); err != nil {
			return fmt.Errorf("delete unanswered entries to %s: %w", at, err)
		}
	}
	return nil
}

// Restore puts back the entry of a redirected flow that has been deleted while
// both ends still use it, f being the entry as it was. An entry that is there
// again already, or whose place a new connection of the client's has, is left
// alone, and is no error.
//
// Counters begin anew. The kernel knows nothing of the connection's sequence
// numbers any more, and takes them from the next packets.
func (c *Client) Restore(f Flow) error {
	restore := func(b []byte) []byte { return appendRestore(b, &f) }
	_, err := c.do(restore)
	if errors.Is(err, unix.EEXIST) {
		// Conntrack may have picked up an answer meanwhile, and taken it for the
		// first packet of a flow of its own.
		var found Flow
		found, err = c.do(func(b []byte) []byte { return appendGet(b, f.Protocol, f.ReplySrc, f.ReplyDst) })
		if errors.Is(err, unix.ENOENT) || err == nil && (found.OrigSrc != f.ReplySrc || found.OrigDst != f.ReplyDst) {
			return nil // what is in the way is a flow of the client's
		}
		if err == nil {
			err = c.Delete(found)
		}
		if err == nil {
			_, err = c.do(restore)
		}
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("restore conntrack entry %s: %w", f, err)
	}
	return nil
}
