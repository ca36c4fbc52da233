package userspace

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of a loop. None of them waits, as every descriptor is
// non-blocking, so the Go scheduler isn't told of them (RawSyscall): it would
// take a loop in a call of more than 20 µs for one that waits, and hand its place to
// another thread (retake in runtime/proc.go). Only waiting for events tells it.

// sysRead is read(2).
func sysRead(fd int, b []byte) (int, unix.Errno) {
	n, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), e
}

// sysWrite is write(2) that isn't interrupted.
func sysWrite(fd int, b []byte) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		if e != unix.EINTR {
			return int(n), e
		}
	}
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

// sysEvents is epoll_wait(2) that doesn't wait.
func sysEvents(epoll int, events []unix.EpollEvent) int {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), 0, 0, 0)
	if e != 0 {
		return 0 // EINTR: nothing else can be wrong with it
	}
	return int(n)
}
