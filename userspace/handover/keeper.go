package handover

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A keeper is a process that shares another one's table of descriptors: what that has open, or opens later,
// outlives it. It costs a process of a megabyte, and nothing for each descriptor. All that it ever does is to send
// descriptors to who asks by its socket (SCM_RIGHTS of unix(7)). pidfd_getfd(2) would do without the
// asking, but container runtimes allow it only to who may trace processes.
//
// A child keeps the table until it executes a program (unshare_files in fs/exec.c), so this one executes none;
// and as the Go runtime doesn't know of it, it makes system calls only, which need neither stack nor scheduler.

// keeperAtOnce is how many descriptors one answer has at most.
const keeperAtOnce = 128

// keeperMemory holds what a keeper works with. The pointers in it are set before it starts.
type keeperMemory struct {
	numbers [keeperAtOnce]int32
	control struct {
		header unix.Cmsghdr
		files  [keeperAtOnce]int32
	}
	part   unix.Iovec
	answer unix.Msghdr
	dies   [1]byte
	name   [16]byte
}

var keeper keeperMemory

// StartKeeper starts this process's keeper, which answers at a socket of one end of a pair (SOCK_SEQPACKET). It
// is a child of this process's parent, and ends with that. Call it once, before memory fills: what there is then
// is kept for as long as the keeper lives (copy on write).
func StartKeeper(socket int) (pid int, err error) {
	k := &keeper
	copy(k.name[:], "kproxy-keeper")
	k.part = unix.Iovec{Base: &k.dies[0], Len: 1}
	k.control.header.Level, k.control.header.Type = unix.SOL_SOCKET, unix.SCM_RIGHTS
	k.answer = unix.Msghdr{Iov: &k.part, Iovlen: 1, Control: (*byte)(unsafe.Pointer(&k.control))}

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &before); err != nil {
		return 0, fmt.Errorf("block signals: %w", err)
	}
	defer unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)
	pid, errno := forkKeeper(socket, os.Getppid())
	if errno != 0 {
		return 0, fmt.Errorf("start keeper of descriptors: %w", errno)
	}
	return pid, nil
}

// forkKeeper is clone(2), and what the child does after it.
//
//go:nosplit
//go:norace
func forkKeeper(socket, parent int) (pid int, errno unix.Errno) {
	r, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_FILES|unix.CLONE_PARENT|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || r != 0 {
		return int(r), errno
	}
	k := &keeper
	unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0, 0)
	unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&k.name)), 0, 0, 0, 0)
	if now, _, _ := unix.RawSyscall6(unix.SYS_GETPPID, 0, 0, 0, 0, 0, 0); int(now) != parent {
		exitKeeper() // it had ended before
	}
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(socket), uintptr(unsafe.Pointer(&k.numbers)), unsafe.Sizeof(k.numbers), 0, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n < 4 {
			exitKeeper() // the other end is closed, or Release asks for it
		}
		k.control.files = k.numbers
		size := unsafe.Sizeof(k.control.header) + n
		k.control.header.SetLen(int(size))
		k.answer.SetControllen(int(size))
		if _, _, errno = unix.RawSyscall6(unix.SYS_SENDMSG, uintptr(socket), uintptr(unsafe.Pointer(&k.answer)), unix.MSG_NOSIGNAL, 0, 0, 0); errno != 0 {
			// One of them isn't there: an answer without any.
			unix.RawSyscall6(unix.SYS_SENDTO, uintptr(socket), uintptr(unsafe.Pointer(&k.dies)), 1, unix.MSG_NOSIGNAL, 0, 0)
		}
	}
}

//go:nosplit
//go:norace
func exitKeeper() {
	for {
		unix.RawSyscall6(unix.SYS_EXIT_GROUP, 0, 0, 0, 0, 0, 0)
	}
}

// Kept are the descriptors of a process that is gone, which its keeper has. One goroutine uses it at a time.
type Kept struct {
	Socket int // whose other end the keeper answers at
	Keeper int // its process
}

// keeperPatience is how long a keeper may take to answer, in seconds.
const keeperPatience = 5

// Take returns descriptors of what has these numbers there, close-on-exec; -1 for one that isn't there.
func (k *Kept) Take(numbers ...int) ([]int, error) {
	if err := unix.SetsockoptTimeval(k.Socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: keeperPatience}); err != nil {
		return nil, fmt.Errorf("take kept descriptors: %w", err)
	}
	out := make([]int, 0, len(numbers))
	for len(numbers) > 0 {
		some := numbers[:min(len(numbers), keeperAtOnce)]
		taken, err := k.take(some)
		for i := 0; err == nil && taken == nil && i < len(some); i++ { // one of them isn't there
			var one []int
			if one, err = k.take(some[i : i+1]); one == nil {
				one = []int{-1}
			}
			out = append(out, one...)
		}
		if err != nil {
			CloseFiles(out)
			return nil, fmt.Errorf("take kept descriptors: %w", err)
		}
		out, numbers = append(out, taken...), numbers[len(some):]
	}
	return out, nil
}

// take is Take of a few; it returns nil if one isn't there.
func (k *Kept) take(numbers []int) ([]int, error) {
	var ask []byte
	for _, n := range numbers {
		ask = binary.NativeEndian.AppendUint32(ask, uint32(n))
	}
	if err := uninterrupted(func() error { return unix.Sendto(k.Socket, ask, unix.MSG_NOSIGNAL, nil) }); err != nil {
		return nil, err
	}
	oob := make([]byte, unix.CmsgSpace(4*keeperAtOnce))
	var n, oobn, flags int
	err := uninterrupted(func() (err error) {
		n, oobn, flags, _, err = unix.Recvmsg(k.Socket, make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case n == 0:
		return nil, errors.New("the keeper is gone")
	}
	files, err := rights(oob[:oobn])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = fmt.Errorf("this process may have too few: %w (ulimit -n)", unix.EMFILE)
	}
	if err != nil {
		CloseFiles(files)
		return nil, err
	}
	return files, nil
}

// Release ends the keeper, and returns when it has closed the descriptors that weren't taken.
func (k *Kept) Release() {
	process, err := unix.PidfdOpen(k.Keeper, 0)
	_ = uninterrupted(func() error { return unix.Sendto(k.Socket, []byte{0}, unix.MSG_NOSIGNAL, nil) })
	if err == nil { // else it has ended
		_ = uninterrupted(func() error {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, keeperPatience*1000)
			return err
		})
		unix.Close(process)
	}
}

// uninterrupted makes a system call again that a signal has interrupted: the Go runtime's own signals do that to
// one with a time-out, whatever SA_RESTART says (signal(7)).
func uninterrupted(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}
