package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// ErrNotFound says that the table has no such entry.
var ErrNotFound = errors.New("no such conntrack entry")

// poolSize is how many requests are under way at a time. The kernel answers
// within the system call, so a few are enough for any number of goroutines.
const poolSize = 4

// dumpSize lets the kernel put many entries into one message: it fills up to
// what the reader has shown to take (netlink_dump in net/netlink/af_netlink.c).
const dumpSize = 32 << 10

// Client talks to the table of one network namespace. It is safe for
// concurrent use. Its sockets stay open: a request costs two system calls.
type Client struct {
	pool chan *socket // idle ones
	all  []*socket

	mu     sync.Mutex // a dump has the socket for itself
	dumper *netlink.Conn
}

// Dial opens a client in the network namespace of the calling thread. It needs
// CAP_NET_ADMIN there.
func Dial() (*Client, error) {
	dumper, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: dumpSize})
	if err != nil {
		return nil, fmt.Errorf("open conntrack socket: %w", err)
	}
	c := &Client{dumper: dumper, pool: make(chan *socket, poolSize)}
	for range poolSize {
		s, err := newSocket()
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.all = append(c.all, s)
		c.pool <- s
	}
	return c, nil
}

// Close closes the sockets. Requests under way fail.
func (c *Client) Close() error {
	err := c.dumper.Close()
	for _, s := range c.all {
		err = errors.Join(err, s.conn.Close())
	}
	return err
}

// GetByReply returns the flow whose answers go from src to dst, or
// [ErrNotFound].
func (c *Client) GetByReply(p service.Protocol, src, dst netip.AddrPort) (Flow, error) {
	f, err := c.getByReply(p, src, dst)
	if err != nil {
		return Flow{}, fmt.Errorf("get %s flow with reply %s > %s: %w", p, src, dst, err)
	}
	return f, nil
}

func (c *Client) getByReply(p service.Protocol, src, dst netip.AddrPort) (Flow, error) {
	src, dst = unmap(src), unmap(dst)
	s := <-c.pool
	defer func() { c.pool <- s }()
	body, err := s.execute(getRequest(p, src, dst))
	if errors.Is(err, unix.ENOENT) {
		return Flow{}, ErrNotFound
	}
	if err != nil {
		return Flow{}, err
	}
	f, err := decode(body)
	if err != nil {
		return Flow{}, err
	}
	// The kernel finds a tuple in either direction: a flow that src began
	// towards dst has it as its original.
	if f.ReplySrc != src || f.ReplyDst != dst {
		return Flow{}, ErrNotFound
	}
	return f, nil
}

// Lookup tells where a packet that a rule redirected to local was headed, and
// who sent it: the kernel gives a client another port when two of its flows
// would look alike to the listener. For a packet that was sent to local itself,
// orig is local.
func (c *Client) Lookup(p service.Protocol, local, client netip.AddrPort) (orig, realClient netip.AddrPort, err error) {
	f, err := c.GetByReply(p, local, client)
	return f.OrigDst, f.OrigSrc, err
}

// Delete deletes an entry, and no other. An entry that is gone already is no
// error. One with the same tuples that came after f stays, unless the kernel
// gave it the same ID.
func (c *Client) Delete(f Flow) error {
	s := <-c.pool
	defer func() { c.pool <- s }()
	if _, err := s.execute(deleteRequest(&f)); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete conntrack entry %s: %w", f, err)
	}
	return nil
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}
