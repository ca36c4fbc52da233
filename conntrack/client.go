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

// messageSize holds any answer about one entry. With it the netlink package
// reads at once instead of asking for the size first.
const messageSize = 8 << 10

// dumpSize lets the kernel put many entries into one message: it fills up to
// what the reader has shown to take (netlink_dump in net/netlink/af_netlink.c).
const dumpSize = 32 << 10

// Client talks to the table of one network namespace. It is safe for
// concurrent use. Its sockets stay open: a request costs two system calls.
type Client struct {
	pool chan *netlink.Conn // idle sockets for requests

	mu     sync.Mutex // a dump has the socket for itself
	dumper *netlink.Conn

	all []*netlink.Conn
}

// Dial opens a client in the network namespace of the calling thread. It needs
// CAP_NET_ADMIN there.
func Dial() (*Client, error) {
	c := &Client{pool: make(chan *netlink.Conn, poolSize)}
	for range poolSize {
		conn, err := c.dial(messageSize)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.pool <- conn
	}
	var err error
	if c.dumper, err = c.dial(dumpSize); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *Client) dial(size int) (*netlink.Conn, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: size})
	if err != nil {
		return nil, fmt.Errorf("open conntrack socket: %w", err)
	}
	c.all = append(c.all, conn)
	return conn, nil
}

// Close closes the sockets. Requests under way fail.
func (c *Client) Close() error {
	var errs []error
	for _, conn := range c.all {
		errs = append(errs, conn.Close())
	}
	return errors.Join(errs...)
}

// execute makes one request.
func (c *Client) execute(m netlink.Message) ([]netlink.Message, error) {
	conn := <-c.pool
	defer func() { c.pool <- conn }()
	answers, err := conn.Execute(m)
	if errors.Is(err, unix.ENOENT) {
		return nil, ErrNotFound
	}
	return answers, err
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
	answers, err := c.execute(getRequest(p, src, dst))
	if err != nil {
		return Flow{}, err
	}
	for _, m := range answers {
		if m.Header.Type != messageNew {
			continue
		}
		f, err := decode(m.Data)
		if err != nil {
			return Flow{}, err
		}
		// The kernel finds a tuple in either direction: a flow that src began
		// towards dst has it as its original.
		if f.ReplySrc == src && f.ReplyDst == dst {
			return f, nil
		}
	}
	return Flow{}, ErrNotFound
}

// Lookup tells where a packet that a rule redirected to local was headed, and
// who sent it: the kernel gives a client another port when two of its flows
// would look alike to the listener. For a packet that was sent to local itself,
// orig is local.
func (c *Client) Lookup(p service.Protocol, local, client netip.AddrPort) (orig, realClient netip.AddrPort, err error) {
	f, err := c.GetByReply(p, local, client)
	return f.OrigDst, f.OrigSrc, err
}

// Delete deletes an entry, and no other: one with the same tuples that came
// after f stays. An entry that is gone already is no error.
func (c *Client) Delete(f Flow) error {
	_, err := c.execute(deleteRequest(&f))
	if err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("delete conntrack entry %s: %w", f, err)
	}
	return nil
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}
