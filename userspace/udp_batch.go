package userspace

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// batchSize is how many datagrams one system call receives, or sends.
const batchSize = 64

const (
	// datagramSize holds any datagram: 65,507 bytes over IPv4, 65,527 over IPv6.
	datagramSize = 1<<16 - 1
	// slotStride is the distance of two slots: a datagram's size and some cache
	// lines, or the beginnings of all slots would share the same few lines.
	slotStride = datagramSize + 1 + 17*64
	// controlSize holds IP_PKTINFO or IPV6_PKTINFO, and IP_TTL, IPV6_HOPLIMIT or UDP_SEGMENT.
	controlSize = 96
)

// mmsghdr is struct mmsghdr of recvmmsg(2) and sendmmsg(2).
type mmsghdr struct {
	unix.Msghdr
	size uint32 // of what was received or sent
}

// batch holds datagrams that were received. Its memory is touched as far as it is used.
type batch struct {
	data    []byte
	hdrs    [batchSize]mmsghdr
	iovs    [batchSize]unix.Iovec
	names   [batchSize]rawAddress
	control [batchSize][controlSize]byte
}

// newBatch takes the memory from the kernel: on the heap it would count as in use,
// touched or not, and let the garbage grow by as much before it is collected.
func newBatch() (*batch, error) {
	data, err := unix.Mmap(-1, 0, batchSize*slotStride, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("get memory for datagrams: %w", err)
	}
	// A page that is touched isn't to bring 511 others; kernels without huge pages refuse.
	_ = unix.Madvise(data, unix.MADV_NOHUGEPAGE)
	b := &batch{data: data}
	for i := range b.hdrs {
		b.iovs[i].Base = &b.data[i*slotStride]
		b.hdrs[i].Iov = &b.iovs[i]
		b.hdrs[i].SetIovlen(1)
	}
	return b, nil
}

// release gives the memory back; b isn't used any more. It may be nil.
func (b *batch) release() {
	if b != nil {
		unix.Munmap(b.data)
	}
}

// receive receives at most n datagrams into the slots from first on (recvmmsg(2)), without
// waiting. With senders, it notes who sent each, and where it arrived.
func (b *batch) receive(fd, first, n int, senders bool) (int, error) {
	hs := b.hdrs[first : first+n]
	for i := range hs {
		h := &hs[i]
		b.iovs[first+i].SetLen(datagramSize)
		if senders {
			h.Name, h.Namelen = (*byte)(unsafe.Pointer(&b.names[first+i])), sizeofAddress6
			h.Control = &b.control[first+i][0]
			h.SetControllen(controlSize)
		}
	}
	return sysMessages(unix.SYS_RECVMMSG, fd, hs)
}

// bytes returns what was received in a slot; false if it was cut off.
func (b *batch) bytes(i int) ([]byte, bool) {
	h := &b.hdrs[i]
	at := i * slotStride
	return b.data[at : at+int(h.size) : at+datagramSize], h.Flags&unix.MSG_TRUNC == 0
}

// oob returns the control messages received in a slot.
func (b *batch) oob(i int) []byte { return b.control[i][:b.hdrs[i].Controllen] }

// The kernel carries several datagrams as one as far as the device, which costs little more
// than one: any number of the same size and at the end one that may be shorter (UDP_SEGMENT in
// udp(7), __udp_gso_segment in net/ipv4/udp_offload.c).
const (
	// maxSegments is UDP_MAX_SEGMENTS of kernels before 6.9.
	maxSegments = 64
	// maxSegmented is the most that fits: the IP length field, less the headers.
	maxSegmented = 1<<16 - 1 - 40 - 8
)

// segments returns how many of ds, from the first, may be sent as segments of one message. A
// datagram without bytes goes alone.
func segments(ds [][]byte) int {
	size, total, n := len(ds[0]), len(ds[0]), 1
	for ; n < min(len(ds), maxSegments); n++ {
		next := len(ds[n])
		if next == 0 || next > size || total%size != 0 || total+next > maxSegmented {
			break
		}
		total += next
	}
	return n
}

// destination says where messages go.
type destination struct {
	name    rawAddress // zero for a connected socket
	control []byte     // IP_PKTINFO or IPV6_PKTINFO, says from which address
	// unsegmented: its datagrams are larger than what the route takes in one packet, or a device
	// or the kernel can't cut them up (udp_send_skb in net/ipv4/udp.c).
	unsegmented bool
}

// outgoing holds what one sendmmsg(2) sends.
type outgoing struct {
	hdrs     [batchSize]mmsghdr
	iovs     [batchSize]unix.Iovec
	control  [batchSize][controlSize]byte
	counts   [batchSize]int // datagrams of each message
	to       [batchSize]*destination
	n, parts int // messages and iovs in use
}

func (o *outgoing) reset() { o.n, o.parts = 0, 0 }

// add adds a message of the first of ds and those that can go with it, and returns how many
// these are. The caller leaves room for them: for a batch at most.
func (o *outgoing) add(ds [][]byte, to *destination) int {
	n := 1
	if !to.unsegmented {
		n = segments(ds)
	}
	h := &o.hdrs[o.n]
	*h = mmsghdr{}
	h.Iov = &o.iovs[o.parts]
	h.SetIovlen(n)
	for _, d := range ds[:n] {
		v := &o.iovs[o.parts]
		v.Base = unsafe.SliceData(d)
		v.SetLen(len(d))
		o.parts++
	}
	if to.name.family != 0 {
		h.Name, h.Namelen = (*byte)(unsafe.Pointer(&to.name)), to.name.size()
	}
	control := append(o.control[o.n][:0], to.control...)
	if n > 1 {
		control = appendSegmentSize(control, len(ds[0]))
	}
	if len(control) > 0 {
		h.Control = &control[0]
		h.SetControllen(len(control))
	}
	o.counts[o.n], o.to[o.n] = n, to
	o.n++
	return n
}

// send sends the messages, without waiting. It returns how many datagrams, from the first, were
// sent, and if none the error of the first message. Without either, add is to be called again, as the
// destination doesn't take segments.
func (o *outgoing) send(fd int) (done int, err error) {
	sent, err := sysMessages(unix.SYS_SENDMMSG, fd, o.hdrs[:o.n])
	for i := range sent {
		done += o.counts[i]
	}
	if err != nil && o.counts[0] > 1 && cannotSegment(err) {
		o.to[0].unsegmented, err = true, nil
	}
	return done, err
}

// cannotSegment reports whether a message couldn't be sent for its segments.
func cannotSegment(err error) bool {
	return slices.Contains([]error{unix.EINVAL, unix.EMSGSIZE, unix.EIO, unix.EOPNOTSUPP, unix.ENOPROTOOPT}, err)
}

// appendSegmentSize appends the control message that has a message cut into segments.
func appendSegmentSize(b []byte, size int) []byte {
	b = binary.NativeEndian.AppendUint64(b, uint64(unix.CmsgLen(2)))
	b = binary.NativeEndian.AppendUint32(b, unix.SOL_UDP)
	b = binary.NativeEndian.AppendUint32(b, unix.UDP_SEGMENT)
	b = binary.NativeEndian.AppendUint16(b, uint16(size))
	return append(b, 0, 0, 0, 0, 0, 0)
}

// replies are datagrams on their way to clients: they go in as few system calls as
// possible, for all sessions together. They are in the worker's batch of that name until then.
type replies struct {
	worker    *udpWorker
	to        [batchSize]*session
	datagrams [batchSize][]byte
	n         int
	used      int            // slots of the batch
	family    service.Family // of all of them
}

// slot returns the next slot, for a session of a family. There is room in it.
func (r *replies) slot(f service.Family) int {
	if r.used == batchSize || r.used > 0 && r.family != f {
		r.flush()
	}
	r.family = f
	return r.used
}

// add takes a datagram in one of the slots, to be sent to x's client.
func (r *replies) add(x *session, data []byte) {
	r.to[r.n], r.datagrams[r.n] = x, data
	r.n++
}

// flush sends them. What can't be sent now is lost.
func (r *replies) flush() {
	fd, o := r.worker.socket(r.family), &r.worker.outgoing
	for begin := 0; begin < r.n; {
		o.reset()
		for i := begin; i < r.n; {
			end := i + 1
			for end < r.n && r.to[end] == r.to[i] {
				end++
			}
			i += o.add(r.datagrams[i:end], &r.to[i].reply)
		}
		n, err := o.send(fd)
		if err != nil {
			n = o.counts[0]
		}
		begin += n
	}
	clear(r.to[:r.n])
	r.n, r.used = 0, 0
}

// sessionKey names a session within a worker, whose datagrams all come to the
// same port. Under one key come the datagrams of one flow at a time: the kernel
// gives a client whose flows would look alike another port. IPv4 addresses are
// in the first bytes.
type sessionKey struct {
	local, client [16]byte
	zone          uint32 // of a link-local client
	port          uint16 // the client's
	family        service.Family
}

// newSessionKey makes the key of datagrams from a client to an address.
func newSessionKey(from netip.AddrPort, to netip.Addr, zone uint32) sessionKey {
	k := sessionKey{zone: zone, port: from.Port(), family: service.FamilyOf(to)}
	copy(k.client[:], from.Addr().AsSlice())
	copy(k.local[:], to.AsSlice())
	return k
}

// keyOf makes the key of a datagram; false if its control messages don't say
// where it arrived. in is the index of the interface, hops its TTL.
func keyOf(name *rawAddress, oob []byte) (k sessionKey, in int, hops int32, ok bool) {
	info, hops := findPacketInfo(oob)
	k.port = binary.BigEndian.Uint16(name.port[:])
	switch {
	case name.family == unix.AF_INET && len(info) == unix.SizeofInet4Pktinfo:
		copy(k.client[:], name.v4[:])
		copy(k.local[:], info[8:12]) // ipi_addr: the header's destination
	case name.family == unix.AF_INET6 && len(info) == unix.SizeofInet6Pktinfo:
		k.family, k.client, k.zone = service.IPv6, name.v6, name.zone
		copy(k.local[:], info)
	default:
		return k, 0, 0, false
	}
	return k, info.interfaceIndex(), hops, true
}

// address returns an address of the key's family.
func (k *sessionKey) address(a *[16]byte, zone uint32) netip.Addr {
	if k.family == service.IPv4 {
		return netip.AddrFrom4([4]byte(a[:4]))
	}
	addr := netip.AddrFrom16(*a)
	if zone != 0 {
		addr = addr.WithZone(zoneName(zone))
	}
	return addr
}

func (k *sessionKey) clientAddress() netip.AddrPort {
	return netip.AddrPortFrom(k.address(&k.client, k.zone), k.port)
}

// zoneName returns the name of the interface that a link-local address is on.
func zoneName(zone uint32) string {
	if ifi, err := net.InterfaceByIndex(int(zone)); err == nil {
		return ifi.Name
	}
	return strconv.Itoa(int(zone))
}

// destination is the key's client, for answers from the address that it had sent to.
func (k *sessionKey) destination() (d destination) {
	d.name = newRawAddress(netip.AddrPortFrom(k.address(&k.client, 0), k.port))
	d.name.zone = k.zone
	if k.family == service.IPv4 {
		d.control = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: [4]byte(k.local[:4])})
	} else {
		d.control = unix.PktInfo6(&unix.Inet6Pktinfo{Addr: k.local})
	}
	return d
}
