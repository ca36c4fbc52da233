package ipvs

import (
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// requestsAtOnce is how many requests one message of the socket carries. Every one may
// fail, and what a socket receives by default (net.core.rmem_default) holds the answers.
const requestsAtOnce = 128

// socket is a netlink socket on which many requests go to the kernel by one system
// call. The kernel carries them out in order, and goes on after one that fails; it
// answers those that fail, and the last one (netlink_rcv_skb in net/netlink/af_netlink.c).
type socket struct {
	fd       int
	sequence uint32
	out, in  []byte // room, kept
}

// openSocket opens one in the network namespace of the calling thread.
func openSocket(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	s := &socket{fd: fd, in: make([]byte, os.Getpagesize())}
	if err := s.setUp(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *socket) setUp() error {
	// An answer is not to repeat what was asked.
	if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	// It is there when send returns. Should there be none, nobody waits for ever.
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	// Nobody but the kernel is to answer.
	return os.NewSyscallError("connect", unix.Connect(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
}

func (s *socket) close() { unix.Close(s.fd) }

// carryOut hands n requests to the kernel and returns the error of each. Each is
// appended by request, which begins with [appendHeader].
func (s *socket) carryOut(n int, request func(b []byte, i int) []byte) []error {
	errs := make([]error, n)
	for first := 0; first < n; first += requestsAtOnce {
		part := errs[first:min(n, first+requestsAtOnce)]
		err := s.send(len(part), func(b []byte, i int) []byte { return request(b, first+i) })
		if err == nil {
			err = s.answers(part)
		}
		if err != nil { // what became of these isn't known
			for i := range part {
				part[i] = err
			}
		}
	}
	return errs
}

func (s *socket) send(n int, request func(b []byte, i int) []byte) error {
	s.out = s.out[:0]
	for i := range n {
		at := len(s.out)
		s.out = request(s.out, i)
		head := s.out[at:]
		if i == n-1 {
			head[6] |= unix.NLM_F_ACK
		}
		s.sequence++
		binary.NativeEndian.PutUint32(head, uint32(len(head)))
		binary.NativeEndian.PutUint32(head[8:], s.sequence)
	}
	for {
		if err := unix.Send(s.fd, s.out, 0); err != unix.EINTR {
			return os.NewSyscallError("send", err)
		}
	}
}

// answers receives the answers to what was sent last, up to that of the last request.
func (s *socket) answers(errs []error) error {
	first := s.sequence - uint32(len(errs)) + 1
	for {
		n, _, err := unix.Recvfrom(s.fd, s.in, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("recvfrom", err)
		}
		for b := s.in[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			length := int(binary.NativeEndian.Uint32(b))
			kind, i := binary.NativeEndian.Uint16(b[4:]), int(binary.NativeEndian.Uint32(b[8:])-first)
			if kind != unix.NLMSG_ERROR || length < unix.NLMSG_HDRLEN+4 || length > len(b) {
				return fmt.Errorf("the kernel's answer isn't one: message of type %d, %d of %d bytes", kind, length, len(b))
			}
			if i >= 0 && i < len(errs) { // others are of requests that were given up
				if code := int32(binary.NativeEndian.Uint32(b[unix.NLMSG_HDRLEN:])); code != 0 {
					errs[i] = unix.Errno(-code)
				}
				if i == len(errs)-1 {
					return nil
				}
			}
			b = b[min(len(b), (length+3)&^3):]
		}
	}
}

// appendHeader begins a request. Its length and number are filled in later.
func appendHeader(b []byte, kind, flags uint16) []byte {
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|flags)
	return append(b, 0, 0, 0, 0, 0, 0, 0, 0)
}

// appendAttribute appends an attribute, with what fills it up to four bytes.
func appendAttribute(b []byte, kind uint16, value ...byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofNlAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, -len(value)&3)...)
}

func appendNumber(b []byte, kind uint16, n uint32) []byte {
	return appendAttribute(b, kind, binary.NativeEndian.AppendUint32(nil, n)...)
}

// appendNested appends an attribute that holds those which content appends.
func appendNested(b []byte, kind uint16, content func([]byte) []byte) []byte {
	at := len(b)
	b = content(appendAttribute(b, kind|unix.NLA_F_NESTED))
	binary.NativeEndian.PutUint16(b[at:], uint16(len(b)-at))
	return b
}
