package netlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

var (
	// ErrNoAnswer says that it isn't known what became of a request.
	ErrNoAnswer = errors.New("the kernel didn't answer")
	// ErrInterrupted says that a list may lack something or hold it twice.
	ErrInterrupted = errors.New("what is listed changed meanwhile")
)

// Socket is a netlink socket on which many requests go to the kernel by one system
// call. The kernel carries them out in order, and goes on after one that fails. It
// has answered when send returns (netlink_unicast_kernel, netlink_rcv_skb in
// net/netlink/af_netlink.c).
type Socket struct {
	FD int // for its options

	sequence uint32
	out, in  []byte // room, kept
	sendRoom int    // that the socket was given
}

// Open opens a socket in the network namespace of the calling thread. room holds
// every answer.
func Open(protocol, room int) (*Socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	// A message about an error is not to repeat what was asked.
	if err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)); err == nil {
		// Only the kernel is to answer.
		err = os.NewSyscallError("connect", unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &Socket{FD: fd, in: make([]byte, room)}, nil
}

// Close closes the socket.
func (s *Socket) Close() error { return unix.Close(s.FD) }

// AppendRequest begins a request. Its length and number are filled in by [Socket.Do].
func AppendRequest(b []byte, kind, flags uint16) []byte {
	b = append(b, 0, 0, 0, 0)
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|flags)
	return append(b, 0, 0, 0, 0, 0, 0, 0, 0)
}

// Do hands n requests, each appended by request, to the kernel in one message, and
// calls reply for each that it answers, until it has answered the last: with the
// body of the answer, or with nil and what an acknowledgement says. The last
// must have an answer, or ask for one (NLM_F_ACK). Answers for which the socket's
// buffer has no room are lost, and those after them; then it is [ErrNoAnswer].
func (s *Socket) Do(n int, request func(b []byte, i int) []byte, reply func(i int, body []byte, err error)) error {
	first := s.sequence + 1
	if err := s.send(n, request); err != nil {
		return err
	}
	for lost := false; ; {
		size, err := unix.Read(s.FD, s.in)
		switch err {
		case nil:
		case unix.EINTR:
			continue
		case unix.ENOBUFS:
			lost = true // those that had room are still there
			continue
		case unix.EAGAIN:
			return ErrNoAnswer
		default:
			return os.NewSyscallError("receive", err)
		}
		for m := range Messages(s.in[:size]) {
			i := int(m.Sequence - first)
			if i < 0 || i >= n {
				continue // of a request that was given up
			}
			if m.Type == unix.NLMSG_ERROR {
				reply(i, nil, m.failure())
			} else {
				reply(i, m.Body, nil)
			}
			if i < n-1 {
				continue
			}
			if lost {
				return ErrNoAnswer
			}
			return nil
		}
	}
}

// send hands n requests to the kernel.
func (s *Socket) send(n int, request func(b []byte, i int) []byte) error {
	s.out = s.out[:0]
	for i := range n {
		at := len(s.out)
		s.out = request(s.out, i)
		s.sequence++
		binary.NativeEndian.PutUint32(s.out[at:], uint32(len(s.out)-at))
		binary.NativeEndian.PutUint32(s.out[at+8:], s.sequence)
	}
	_, err := unix.Write(s.FD, s.out)
	for err == unix.EINTR {
		_, err = unix.Write(s.FD, s.out)
	}
	return os.NewSyscallError("send", err)
}

// Dump makes one request for a list (NLM_F_DUMP), and calls each with the body of every
// message of it, whatever the error. The kernel has the next part ready when one has
// been read (netlink_recvmsg in net/netlink/af_netlink.c). It refuses another list before that
// (EBUSY), so what was given up of earlier ones is read first.
func (s *Socket) Dump(request func(b []byte) []byte, each func(body []byte)) error {
	return s.DumpWhile(request, func(body []byte) bool {
		each(body)
		return true
	})
}

// DumpWhile is Dump until each returns false. The rest of the list isn't made before it is read.
func (s *Socket) DumpWhile(request func(b []byte) []byte, each func(body []byte) bool) error {
	for err := error(nil); err != unix.EAGAIN; {
		if _, err = unix.Read(s.FD, s.in); err != nil && err != unix.EINTR && err != unix.ENOBUFS && err != unix.EAGAIN {
			return os.NewSyscallError("receive", err)
		}
	}
	if err := s.send(1, func(b []byte, _ int) []byte { return request(b) }); err != nil {
		return err
	}
	for interrupted := false; ; {
		size, err := unix.Read(s.FD, s.in)
		switch err {
		case nil:
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return ErrNoAnswer
		default:
			return os.NewSyscallError("receive", err)
		}
		for m := range Messages(s.in[:size]) {
			if m.Sequence != s.sequence {
				continue // of a request that was given up
			}
			interrupted = interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
			if m.Type != unix.NLMSG_DONE && m.Type != unix.NLMSG_ERROR {
				if !each(m.Body) {
					return nil
				}
				continue
			}
			if err := m.failure(); err != nil || !interrupted {
				return err
			}
			return ErrInterrupted
		}
	}
}

// Message is one that the kernel sent.
type Message struct {
	Type, Flags uint16
	Sequence    uint32
	Body        []byte
}

// failure returns the error that the kernel's message about an error, or about the end of a list,
// bears; nil if none.
func (m *Message) failure() error {
	if len(m.Body) < 4 {
		return nil
	}
	if code := int32(binary.NativeEndian.Uint32(m.Body)); code != 0 {
		return unix.Errno(-code)
	}
	return nil
}

// Messages iterates over what was read from a socket, to the first message that is
// cut short.
func Messages(b []byte) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			n := int(binary.NativeEndian.Uint32(b))
			if n < unix.NLMSG_HDRLEN || n > len(b) {
				return
			}
			if !yield(Message{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:n]}) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

// changesAtOnce is how many changes one message carries. Every one may fail, and
// what a socket receives by default (net.core.rmem_default) holds the answers.
const changesAtOnce = 128

// Change hands n requests to the kernel that ask for no answer, and returns the
// error of each.
func (s *Socket) Change(n int, request func(b []byte, i int) []byte) []error {
	errs := make([]error, n)
	for first := 0; first < n; first += changesAtOnce {
		part := errs[first:min(n, first+changesAtOnce)]
		err := s.Do(len(part), func(b []byte, i int) []byte {
			at := len(b)
			if b = request(b, first+i); i == len(part)-1 {
				b[at+6] |= unix.NLM_F_ACK
			}
			return b
		}, func(i int, _ []byte, err error) { part[i] = err })
		if err != nil {
			for i := range part { // what became of these isn't known
				part[i] = err
			}
		}
	}
	return errs
}

// RequestError is the error of one of many requests.
type RequestError struct {
	Index int
	Err   error
}

func (e *RequestError) Error() string { return fmt.Sprintf("request %d: %v", e.Index, e.Err) }

// Unwrap returns what the kernel said.
func (e *RequestError) Unwrap() error { return e.Err }

// Transaction hands requests to a subsystem of nfnetlink as one transaction: all of them
// take effect, or none. The error is the first that a request had, a [*RequestError]; or
// [ErrNoAnswer] where it isn't known whether they took effect.
func (s *Socket) Transaction(subsystem uint16, requests [][]byte) error {
	failures, err := s.transaction(subsystem, requests, true)
	if len(failures) > 0 {
		return &failures[0]
	}
	return err
}

// Refusals has the kernel check a transaction without carrying it out, as it lacks an end
// (nfnetlink_rcv_batch in net/netfilter/nfnetlink.c), and returns the requests that it
// refuses: all of them, if the socket's buffer has room for so many answers. The error is
// about the transaction as a whole.
func (s *Socket) Refusals(subsystem uint16, requests [][]byte) ([]RequestError, error) {
	return s.transaction(subsystem, requests, false)
}

func (s *Socket) transaction(subsystem uint16, requests [][]byte, carryOut bool) (failures []RequestError, _ error) {
	mark := func(kind uint16) []byte {
		b := AppendRequest(nil, kind, 0)
		return append(b, unix.AF_UNSPEC, unix.NFNETLINK_V0, byte(subsystem>>8), byte(subsystem)) // nfgenmsg's res_id
	}
	size := 64
	for _, r := range requests {
		size += len(r)
	}
	// The socket takes no more than its buffer (netlink_sendmsg in net/netlink/af_netlink.c).
	if size > s.sendRoom {
		if err := unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 2*size); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
		s.sendRoom = size
	}
	s.out = slices.Grow(s.out[:0], size)
	first, last, n := s.sequence+1, len(requests), len(requests)+1
	if carryOut {
		n++
	}
	err := s.send(n, func(b []byte, i int) []byte {
		switch i {
		case 0:
			return append(b, mark(unix.NFNL_MSG_BATCH_BEGIN)...)
		case len(requests) + 1:
			return append(b, mark(unix.NFNL_MSG_BATCH_END)...)
		}
		at := len(b)
		if b = append(b, requests[i-1]...); i == last {
			b[at+6] |= unix.NLM_F_ACK
		}
		return b
	})
	if s.out = s.out[:0]; cap(s.out) > keptRoom {
		s.out = nil
	}
	if err != nil {
		return nil, err
	}
	for done, lost := false, false; ; {
		size, err := unix.Read(s.FD, s.in)
		switch {
		case err == unix.EINTR:
		case err == unix.ENOBUFS:
			lost = true
		case err == unix.EAGAIN && (len(failures) > 0 || done && !lost):
			return failures, nil
		case err == unix.EAGAIN:
			return nil, ErrNoAnswer
		case err != nil:
			return nil, os.NewSyscallError("receive", err)
		}
		for m := range Messages(s.in[:max(0, size)]) {
			i := int(m.Sequence - first)
			if i < 0 || i >= n || m.Type != unix.NLMSG_ERROR {
				continue
			}
			if err := m.failure(); err != nil {
				failures = append(failures, RequestError{i - 1, err})
			}
			done = done || i == last
		}
	}
}

// keptRoom is how large a buffer is kept from one request to the next.
const keptRoom = 1 << 20
