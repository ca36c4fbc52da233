package userspace

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmsghdr is struct mmsghdr of recvmmsg(2) and sendmmsg(2).
type mmsghdr struct {
	unix.Msghdr
	size uint32 // of what was received or sent
}

// The calls below never wait, so they go past the runtime's bookkeeping for
// calls that may (RawSyscall).

// receiveMany receives into as many of hs as there are datagrams (recvmmsg(2)).
func receiveMany(fd int, hs []mmsghdr) (int, error) { return many(unix.SYS_RECVMMSG, fd, hs) }

// sendMany sends until one of hs fails; the error is that of the first (sendmmsg(2)).
func sendMany(fd int, hs []mmsghdr) (int, error) { return many(unix.SYS_SENDMMSG, fd, hs) }

func many(call uintptr, fd int, hs []mmsghdr) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(&hs[0])), uintptr(len(hs)), unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
			continue
		}
		return 0, errno
	}
}

// sendOne sends b over a connected socket.
func sendOne(fd int, b []byte) error {
	var p unsafe.Pointer
	if len(b) > 0 {
		p = unsafe.Pointer(&b[0])
	}
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(p), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
			continue
		}
		return errno
	}
}

// nothingIn reports whether there is nothing to receive, not even an error.
func nothingIn(fd int) bool {
	var b [1]byte
	_, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), 1, unix.MSG_DONTWAIT, 0, 0)
	return errno == unix.EAGAIN
}
