package e2e

import (
	big "encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
)

// intruder sits on a backend and answers every TCP packet that clients send to
// its line server with one more, far outside of the window, as if it came from
// the server. It counts the resets that come back. (What the sequence numbers
// are it sees; a reset with these ends the connection.)
type intruder struct {
	packets, raw [2]int // file descriptors, by family: to see, to send
	sent, resets atomic.Int64
	stop         atomic.Bool
	done         chan struct{}
}

// intrude starts an intruder on a backend until the test's end.
func (w *world) intrude(b *lab.Backend) *intruder {
	w.Helper()
	in := &intruder{done: make(chan struct{}, 2)}
	w.must(b.Namespace.Do(in.open))
	for f := range in.packets {
		go in.run(f)
	}
	w.Cleanup(func() {
		in.stop.Store(true)
		for range in.packets {
			<-in.done
		}
		for f := range in.packets {
			unix.Close(in.packets[f])
			unix.Close(in.raw[f])
		}
	})
	return in
}

func (in *intruder) open() (err error) {
	for f, family := range []int{unix.AF_INET, unix.AF_INET6} {
		ether := []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6}[f]
		if in.packets[f], err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(ether>>8|ether<<8)); err != nil {
			return fmt.Errorf("open packet socket: %w", err)
		}
		if err := unix.SetsockoptTimeval(in.packets[f], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}); err != nil {
			return fmt.Errorf("set time limit: %w", err)
		}
		if in.raw[f], err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP); err != nil {
			return fmt.Errorf("open raw socket: %w", err)
		}
	}
	return nil
}

func (in *intruder) run(f int) {
	defer func() { in.done <- struct{}{} }()
	b := make([]byte, 65536)
	for !in.stop.Load() {
		n, _, err := unix.Recvfrom(in.packets[f], b, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		in.take(f, b[:n])
	}
}

// take looks at an IP packet.
func (in *intruder) take(f int, b []byte) {
	src, dst, tcp, ok := addressesOf(f, b)
	if !ok || big.BigEndian.Uint16(tcp[2:]) != lab.LinePort {
		return
	}
	const fin, syn, rst = 1, 2, 4
	flags, header := tcp[13], int(tcp[12]>>4)*4
	switch {
	case flags&rst != 0:
		in.resets.Add(1)
		return
	case flags&(fin|syn) != 0:
		return
	}
	next := big.BigEndian.Uint32(tcp[4:]) + uint32(len(tcp)-header) // what the server expects of the client
	out := make([]byte, 20)
	copy(out, tcp[2:4])     // from the server's port
	copy(out[2:], tcp[0:2]) // to the client's
	big.BigEndian.PutUint32(out[4:], big.BigEndian.Uint32(tcp[8:])+1<<30)
	big.BigEndian.PutUint32(out[8:], next)
	out[12], out[13] = 5<<4, 16 // ACK
	big.BigEndian.PutUint16(out[14:], 512)
	big.BigEndian.PutUint16(out[16:], checksum(dst, src, out))
	var to unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte(src.AsSlice()[:4])}
	if f == 1 {
		to = &unix.SockaddrInet6{Addr: src.As16()}
	}
	if unix.Sendto(in.raw[f], out, 0, to) == nil {
		in.sent.Add(1)
	}
}

// addressesOf takes a TCP packet apart.
func addressesOf(f int, b []byte) (src, dst netip.Addr, tcp []byte, ok bool) {
	if f == 0 {
		if len(b) < 20 || b[9] != unix.IPPROTO_TCP {
			return src, dst, nil, false
		}
		src, dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		total, header := int(big.BigEndian.Uint16(b[2:])), int(b[0]&15)*4
		if total > len(b) || header+20 > total {
			return src, dst, nil, false
		}
		return src, dst, b[header:total], true
	}
	if len(b) < 60 || b[6] != unix.IPPROTO_TCP {
		return src, dst, nil, false
	}
	total := 40 + int(big.BigEndian.Uint16(b[4:]))
	if total > len(b) || total < 60 {
		return src, dst, nil, false
	}
	return netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40])), b[40:total], true
}

// checksum is TCP's (RFC 9293, section 3.1).
func checksum(src, dst netip.Addr, tcp []byte) uint16 {
	pseudo := append(append(src.AsSlice(), dst.AsSlice()...), 0, unix.IPPROTO_TCP, byte(len(tcp)>>8), byte(len(tcp)))
	sum := uint32(0)
	for _, part := range [][]byte{pseudo, tcp} {
		for i := 0; i+1 < len(part); i += 2 {
			sum += uint32(big.BigEndian.Uint16(part[i:]))
		}
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
