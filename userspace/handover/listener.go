package handover

import (
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// ListenerFile returns a descriptor of l, which the caller closes. [net.TCPListener.File] would make the socket, which
// both share, a blocking one.
func ListenerFile(l net.Listener) (fd int, err error) {
	raw, err := l.(syscall.Conn).SyscallConn()
	if err != nil {
		return -1, err
	}
	if ctrl := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) }); ctrl != nil {
		return -1, ctrl
	}
	return fd, err
}

// FileListener returns the listener of a descriptor, which it takes over.
func FileListener(fd int, name string) (net.Listener, error) {
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return net.FileListener(f)
}
