package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// lookupsAtOnce is how many requests go in one message: their answers, of up to
// 4 kB each as the kernel reckons (NLMSG_GOODSIZE), wait in the socket's buffer,
// which is 208 kB by default.
const lookupsAtOnce = 32

// LookupAll is Lookup for several flows, each given by where it arrives and its
// client: it calls found for each in turn, which must not call c. It costs fewer
// system calls, and waits for nothing but other look-ups.
func (c *Client) LookupAll(p service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	s := <-c.pool
	defer func() { c.pool <- s }()
	for start := 0; start < len(flows); start += lookupsAtOnce {
		some := flows[start:min(len(flows), start+lookupsAtOnce)]
		err := s.askAll(p, some)
		for i, f := range some {
			if err != nil {
				found(start+i, netip.AddrPort{}, netip.AddrPort{}, lookupError(p, f, err))
				continue
			}
			flow, failed := s.nextReply(f)
			if failed != nil {
				failed = lookupError(p, f, failed)
			}
			found(start+i, flow.OrigDst, flow.OrigSrc, failed)
		}
	}
}

func lookupError(p service.Protocol, f [2]netip.AddrPort, err error) error {
	return fmt.Errorf("get %s flow with reply %s > %s: %w", p, f[0], f[1], err)
}

// askAll sends a request for each flow, in one message: the kernel takes them
// one after the other (netlink_rcv_skb in net/netlink/af_netlink.c). Their
// sequence numbers begin at s.sequence.
func (s *socket) askAll(p service.Protocol, flows [][2]netip.AddrPort) error {
	b := s.requests[:0]
	for i, f := range flows {
		start := len(b)
		b = append(b, make([]byte, unix.NLMSG_HDRLEN)...)
		b = appendHeader(b, service.FamilyOf(unmap(f[0]).Addr()))
		b = appendTuple(b, ctaTupleReply, p, unmap(f[0]), unmap(f[1]))
		h := b[start:]
		binary.NativeEndian.PutUint32(h, uint32(len(h)))
		binary.NativeEndian.PutUint16(h[4:], messageGet)
		binary.NativeEndian.PutUint16(h[6:], unix.NLM_F_REQUEST)
		binary.NativeEndian.PutUint32(h[8:], s.sequence+uint32(i))
	}
	s.requests = b
	var err error
	if ctrlErr := s.raw.Control(func(fd uintptr) { _, err = syscall.Write(int(fd), b) }); ctrlErr != nil {
		return ctrlErr
	}
	return err
}

// nextReply reads the answer to the next request of askAll, which was for f. An
// answer comes by itself: whatever is left over is of an earlier request that
// failed half way.
func (s *socket) nextReply(f [2]netip.AddrPort) (Flow, error) {
	sequence := s.sequence
	s.sequence++
	for {
		n, err := s.read()
		if err != nil {
			return Flow{}, err
		}
		body, done, err := answer(s.buf[:n], sequence)
		if errors.Is(err, unix.ENOENT) {
			return Flow{}, ErrNotFound
		}
		if err != nil {
			return Flow{}, err
		}
		if !done {
			continue
		}
		flow, err := decode(body)
		if err == nil && (flow.ReplySrc != unmap(f[0]) || flow.ReplyDst != unmap(f[1])) {
			err = ErrNotFound // see getByReply
		}
		return flow, err
	}
}
