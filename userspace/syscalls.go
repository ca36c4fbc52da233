package userspace

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of a loop. None of them waits for long, as every descriptor is
// non-blocking, so the Go scheduler doesn't hear of them (RawSyscall): it would
// take a loop in a call of more than 20 µs for one that waits, and hand its place to
// another thread (retake in runtime/proc.go).

// sysReceive is recvfrom(2): read(2) without its way through the kernel's files.
func sysReceive(fd int, b []byte) (int, unix.Errno) {
	n, _, e := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), 0, 0, 0)
	return int(n), e
}

// sysSend is sendto(2) that isn't interrupted, and raises no signal.
func sysSend(fd int, b []byte) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_NOSIGNAL, 0, 0)
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

// sysMessages is recvmmsg(2) or sendmmsg(2), without waiting; the error is that of the first message.
func sysMessages(call uintptr, fd int, hs []mmsghdr) (int, error) {
	for {
		n, _, e := unix.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(hs))), uintptr(len(hs)), unix.MSG_DONTWAIT, 0, 0)
		switch e {
		case 0:
			return int(n), nil
		case unix.EINTR:
			continue
		}
		return 0, e
	}
}

// nothingToReceive reports whether there is nothing, not even an error.
func nothingToReceive(fd int) bool {
	_, e := sysReceive(fd, make([]byte, 1))
	return e == unix.EAGAIN
}

// sysSplice is splice(2) of at most n bytes, without waiting for either end.
func sysSplice(from, to, n int) (int, unix.Errno) {
	done, _, e := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n), unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	return int(done), e
}

// sysClose is close(2): the descriptor is gone in any case.
func sysClose(fd int) { unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

// sysControl is epoll_ctl(2).
func sysControl(epoll, op, fd int, ev *unix.EpollEvent) unix.Errno {
	_, _, e := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epoll), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(ev)), 0, 0)
	return e
}

// sysEvents is epoll_wait(2) for at most patience milliseconds.
func sysEvents(epoll int, events []unix.EpollEvent, patience int) int {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), uintptr(patience), 0, 0)
	if e != 0 {
		return 0 // EINTR: nothing else can be wrong with it
	}
	return int(n)
}

// sysAccept is accept4(2).
func sysAccept(fd int, from *rawAddress) (int, unix.Errno) {
	size := uint32(sizeofAddress6)
	n, _, e := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(from)), uintptr(unsafe.Pointer(&size)),
		unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	return int(n), e
}

// sysSocket is socket(2).
func sysSocket(domain, kind int) (int, unix.Errno) {
	n, _, e := unix.RawSyscall(unix.SYS_SOCKET, uintptr(domain), uintptr(kind)|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	return int(n), e
}

// sysBind is bind(2).
func sysBind(fd int, to *rawAddress) unix.Errno {
	_, _, e := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(to)), uintptr(to.size()))
	return e
}

// sysConnect is connect(2).
func sysConnect(fd int, to *rawAddress) unix.Errno {
	_, _, e := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(to)), uintptr(to.size()))
	return e
}

// sysLocal is getsockname(2).
func sysLocal(fd int, local *rawAddress) unix.Errno {
	size := uint32(sizeofAddress6)
	_, _, e := unix.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(local)), uintptr(unsafe.Pointer(&size)))
	return e
}

// sysPeer is getpeername(2).
func sysPeer(fd int, peer *rawAddress) unix.Errno {
	size := uint32(sizeofAddress6)
	_, _, e := unix.RawSyscall(unix.SYS_GETPEERNAME, uintptr(fd), uintptr(unsafe.Pointer(peer)), uintptr(unsafe.Pointer(&size)))
	return e
}

// sysOption is setsockopt(2) of an int.
func sysOption(fd, level, name int, value int32) unix.Errno {
	_, _, e := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name), uintptr(unsafe.Pointer(&value)), 4, 0)
	return e
}

// sysAskOption is getsockopt(2). The size of *value has to be at least that of the
// option's value.
func sysAskOption[T any](fd, level, name int, value *T) unix.Errno {
	size := uint32(unsafe.Sizeof(*value))
	_, _, e := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name), uintptr(unsafe.Pointer(value)), uintptr(unsafe.Pointer(&size)), 0)
	return e
}

// sysShutdown is shutdown(2).
func sysShutdown(fd, how int) {
	unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), uintptr(how), 0)
}

// rawAddress is a socket address as the kernel has it, struct sockaddr_in or
// sockaddr_in6, in place: those of x/sys are allocated, and to tell which kind
// they are it asks for the socket's protocol after each accept.
type rawAddress struct {
	family uint16
	port   [2]byte // network order, as is all that follows
	v4     [4]byte // flow information in an IPv6 address
	v6     [16]byte
	zone   uint32
}

const (
	sizeofAddress4 = unix.SizeofSockaddrInet4
	sizeofAddress6 = unix.SizeofSockaddrInet6
)

// newRawAddress is a's. It leaves zones out.
func newRawAddress(a netip.AddrPort) (r rawAddress) {
	r.family = unix.AF_INET6
	if a.Addr().Is4() {
		r.family, r.v4 = unix.AF_INET, a.Addr().As4()
	} else {
		r.v6 = a.Addr().As16()
	}
	binary.BigEndian.PutUint16(r.port[:], a.Port())
	return r
}

func (r *rawAddress) size() uint32 {
	if r.family == unix.AF_INET {
		return sizeofAddress4
	}
	return sizeofAddress6
}

// addrPort is r without its zone. IPv4-mapped addresses become IPv4 ones.
func (r *rawAddress) addrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(r.port[:])
	switch r.family {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4(r.v4), port)
	case unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16(r.v6).Unmap(), port)
	}
	return netip.AddrPort{}
}

// failure is e as an error: nil if it is 0.
func failure(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}
