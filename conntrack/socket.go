package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// answerSize holds any answer about one entry.
const answerSize = 8 << 10

var errNoAnswer = errors.New("the kernel didn't answer")

// socket makes one request at a time. It isn't safe for concurrent use.
//
// It reads answers itself: ctnetlink marks the answer to a get as part of
// several (NLM_F_MULTI) and sends no end of them, for which
// [netlink.Conn.Execute] would wait for ever.
type socket struct {
	conn *netlink.Conn
	raw  syscall.RawConn
	buf  [answerSize]byte

	requests []byte                // of askAll
	sequence uint32                // of its next request
	replies  *[lookupsAtOnce]reply // of lookUp
}

func newSocket() (*socket, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("open conntrack socket: %w", err)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open conntrack socket: %w", err), conn.Close())
	}
	return &socket{conn: conn, raw: raw}, nil
}

// execute sends a request and returns the body of its answer, which is valid
// until the next call; nil for a mere acknowledgement.
func (s *socket) execute(m netlink.Message) ([]byte, error) {
	sent, err := s.conn.Send(m)
	if err != nil {
		return nil, err
	}
	for {
		n, err := s.read()
		if err != nil {
			return nil, err
		}
		if body, done, err := answer(s.buf[:n], sent.Header.Sequence); done || err != nil {
			return body, err
		}
	}
}

// read doesn't wait: the kernel has answered when send returns
// (netlink_unicast_kernel in net/netlink/af_netlink.c).
func (s *socket) read() (n int, err error) {
	ctrlErr := s.raw.Read(func(fd uintptr) bool {
		for {
			if n, err = syscall.Read(int(fd), s.buf[:]); err != unix.EINTR {
				return true
			}
		}
	})
	if ctrlErr != nil {
		return 0, ctrlErr
	}
	if err == unix.EAGAIN {
		err = errNoAnswer
	}
	return n, err
}

// answer finds the answer to a request in what was read: struct nlmsghdr, then
// the body, which is an entry or struct nlmsgerr.
func answer(b []byte, sequence uint32) (body []byte, done bool, err error) {
	for len(b) >= unix.NLMSG_HDRLEN {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.NLMSG_HDRLEN || n > len(b) {
			return nil, false, errShort
		}
		typ, seq, body := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:n]
		b = b[min(align(n), len(b)):]
		switch {
		case seq != sequence: // of an earlier request that failed half way
		case typ == messageNew:
			return body, true, nil
		case typ == unix.NLMSG_ERROR && len(body) >= 4:
			if errno := -int32(binary.NativeEndian.Uint32(body)); errno != 0 {
				return nil, true, syscall.Errno(errno)
			}
			return nil, true, nil
		}
	}
	return nil, false, nil
}
