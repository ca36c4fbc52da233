package userspace

import (
	"errors"

	"golang.org/x/sys/unix"
)

// outgoing is what one sendmmsg sends.
type outgoing struct {
	hdrs     [batchSize]mmsghdr
	iovs     [batchSize]unix.Iovec
	control  [batchSize][controlSize]byte
	pieces   [batchSize]int // how many each message consists of
	n, parts int            // messages and iovs in use
}

func (o *outgoing) reset() { o.n, o.parts = 0, 0 }

// add makes a message of the first of ps and those that can go with it, and
// returns how many that are; to may be nil. The caller sees to it that there
// is room: a batch has as many pieces at most.
func (o *outgoing) add(ps []piece, to *replyHeader) int {
	n, segment := coupled(ps)
	h := &o.hdrs[o.n]
	*h = mmsghdr{}
	h.Iov = &o.iovs[o.parts]
	h.SetIovlen(n)
	for _, p := range ps[:n] {
		v := &o.iovs[o.parts]
		v.Base = nil
		if len(p.data) > 0 {
			v.Base = &p.data[0]
		}
		v.SetLen(len(p.data))
		o.parts++
	}
	control := o.control[o.n][:0]
	if to != nil {
		h.Name, h.Namelen = to.first(), to.size
		control = append(control, to.control...)
	}
	if segment != 0 {
		control = appendSegment(control, segment)
	}
	if len(control) > 0 {
		h.Control = &control[0]
		h.SetControllen(len(control))
	}
	o.pieces[o.n] = n
	o.n++
	return n
}

// cannotSegment reports whether a train couldn't be sent for being one: its
// datagrams are larger than what the route takes in one packet, or a device or
// the kernel can't cut it up (udp_send_skb in net/ipv4/udp.c).
func cannotSegment(err error) bool {
	for _, e := range []error{unix.EINVAL, unix.EMSGSIZE, unix.EIO, unix.EOPNOTSUPP, unix.ENOPROTOOPT} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
