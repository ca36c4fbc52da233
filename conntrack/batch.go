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

// reply is what the kernel said of a flow.
type reply struct {
	had  bool
	flow Flow
	err  error
}

// LookupAll is Lookup for several flows, each given by where it arrives and its
// client: it calls found for each in turn, which must not call c. It costs fewer
// system calls, and waits for nothing but other look-ups.
func (c *Client) LookupAll(p service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	s := <-c.pool
	defer func() { c.pool <- s }()
	for start := 0; start < len(flows); start += lookupsAtOnce {
		some := flows[start:min(len(flows), start+lookupsAtOnce)]
		for i, r := range s.lookUp(p, some) {
			if r.err != nil {
				r.err = fmt.Errorf("get %s flow with reply %s > %s: %w", p, some[i][0], some[i][1], r.err)
			}
			found(start+i, r.flow.OrigDst, r.flow.OrigSrc, r.err)
		}
	}
}

// lookUp returns the replies for flows, valid until the next call. The kernel drops
// answers that find no room, and those after them until the socket is empty
// (netlink_attachskb): what is lost is asked for again, as long as that helps.
func (s *socket) lookUp(p service.Protocol, flows [][2]netip.AddrPort) []reply {
	if s.replies == nil {
		s.replies = new([lookupsAtOnce]reply)
	}
	replies := s.replies[:len(flows)]
	for i := range replies {
		replies[i] = reply{err: errNoAnswer}
	}
	for missing := len(flows); missing > 0; {
		left, err := s.askAll(p, flows, replies)
		if err == nil && left < missing {
			missing = left
			continue
		}
		for i := range replies {
			if !replies[i].had && err != nil {
				replies[i].err = err
			}
		}
		break
	}
	return replies
}

// askAll sends a request for each flow without a reply, in one message, which the
// kernel takes one after the other (netlink_rcv_skb in net/netlink/af_netlink.c), and
// reads the answers. It returns how many are still missing.
func (s *socket) askAll(p service.Protocol, flows [][2]netip.AddrPort, replies []reply) (missing int, err error) {
	first := s.sequence
	s.sequence += uint32(len(flows)) // whatever comes later of these is nobody's
	b := s.requests[:0]
	for i, f := range flows {
		if replies[i].had {
			continue
		}
		missing++
		start := len(b)
		b = append(b, make([]byte, unix.NLMSG_HDRLEN)...)
		b = appendHeader(b, service.FamilyOf(unmap(f[0]).Addr()))
		b = appendTuple(b, ctaTupleReply, p, unmap(f[0]), unmap(f[1]))
		h := b[start:]
		binary.NativeEndian.PutUint32(h, uint32(len(h)))
		binary.NativeEndian.PutUint16(h[4:], messageGet)
		binary.NativeEndian.PutUint16(h[6:], unix.NLM_F_REQUEST)
		binary.NativeEndian.PutUint32(h[8:], first+uint32(i))
	}
	s.requests = b
	if ctrlErr := s.raw.Control(func(fd uintptr) { _, err = syscall.Write(int(fd), b) }); ctrlErr != nil {
		err = ctrlErr
	}
	for missing > 0 && err == nil {
		var n int
		if n, err = s.read(); err != nil {
			if err == unix.ENOBUFS {
				err = nil // some are lost; those that had room are still there
			}
			continue
		}
		if i, r := replyIn(s.buf[:n], first, flows); r.had && !replies[i].had {
			replies[i] = r
			missing--
		}
	}
	if err == errNoAnswer {
		err = nil
	}
	return missing, err
}

// replyIn finds the reply in an answer, which comes by itself, and to which of the
// flows it is, whose sequence numbers begin at first. What belongs to none of
// them is of an earlier request that failed half way.
func replyIn(b []byte, first uint32, flows [][2]netip.AddrPort) (i int, r reply) {
	if len(b) < unix.NLMSG_HDRLEN {
		return 0, r
	}
	sequence := binary.NativeEndian.Uint32(b[8:])
	if sequence-first >= uint32(len(flows)) {
		return 0, r
	}
	i = int(sequence - first)
	var body []byte
	body, r.had, r.err = answer(b, sequence)
	switch {
	case errors.Is(r.err, unix.ENOENT):
		r.err = ErrNotFound
	case r.err != nil:
		r.had = true
	case r.had:
		r.flow, r.err = decode(body)
		if f := flows[i]; r.err == nil && (r.flow.ReplySrc != unmap(f[0]) || r.flow.ReplyDst != unmap(f[1])) {
			r = reply{had: true, err: ErrNotFound} // see getByReply
		}
	}
	return i, r
}
