package userspace

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// The kernel carries several datagrams of one flow as one: what is received
// with UDP_GRO, and sent with UDP_SEGMENT, is any number of datagrams of the
// same size and at its end one that may be shorter (udp(7),
// __udp_gso_segment in net/ipv4/udp_offload.c).
const (
	// maxSegments is UDP_MAX_SEGMENTS of kernels before 6.9.
	maxSegments = 64
	// maxTrain is the most that fits: the IP length field, less the headers.
	maxTrain = 1<<16 - 1 - 40 - 8
)

// piece is what one receive returned: a datagram or, where segment isn't 0, a
// train of them.
type piece struct {
	data    []byte
	segment int
}

// datagrams returns how many it consists of.
func (p piece) datagrams() int {
	if p.segment == 0 {
		return 1
	}
	return (len(p.data) + p.segment - 1) / p.segment
}

// coupled returns how many of ps, from the first, may be sent as one train, and
// the size of its segments; a single datagram has segment 0. Nothing is put in
// front of or behind a datagram without bytes: a train can't hold it.
func coupled(ps []piece) (n, segment int) {
	first := ps[0]
	segment = first.segment
	if segment == 0 {
		segment = len(first.data)
	}
	total, count := len(first.data), first.datagrams()
	for n = 1; n < len(ps); n++ {
		next := ps[n]
		size := next.segment
		if size == 0 {
			size = len(next.data)
		}
		if total%max(segment, 1) != 0 || size == 0 || size > segment || size < segment && next.segment != 0 ||
			total+len(next.data) > maxTrain || count+next.datagrams() > maxSegments {
			break
		}
		total += len(next.data)
		count += next.datagrams()
	}
	if count == 1 {
		segment = 0
	}
	return n, segment
}

// split calls f with each datagram of a piece that was cut in segments.
func (p piece) split(f func([]byte)) {
	if p.segment == 0 {
		f(p.data)
		return
	}
	for b := p.data; len(b) > 0; {
		n := min(p.segment, len(b))
		f(b[:n])
		b = b[n:]
	}
}

// appendSegment appends the control message that has a train cut in segments.
func appendSegment(b []byte, size int) []byte {
	b = binary.NativeEndian.AppendUint64(b, uint64(unix.CmsgLen(2)))
	b = binary.NativeEndian.AppendUint32(b, unix.SOL_UDP)
	b = binary.NativeEndian.AppendUint32(b, unix.UDP_SEGMENT)
	b = binary.NativeEndian.AppendUint16(b, uint16(size))
	return append(b, 0, 0, 0, 0, 0, 0)
}
