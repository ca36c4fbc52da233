package agent

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// lockName is an abstract socket address. Abstract sockets belong to a network
// namespace, just like the rules kproxy programs, and the kernel drops them
// when the process ends, however it ends (unix(7)).
const lockName = "@kproxy.dev/node"

// lockNode makes sure that one kproxy programs this network namespace. The
// returned function releases the lock.
func lockNode() (release func(), err error) {
	l, err := net.Listen("unix", lockName)
	if err == nil {
		return func() { l.Close() }, nil
	}
	if !errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("take the node's lock: %w", err)
	}
	who := ""
	if pid := lockHolder(); pid != 0 {
		who = fmt.Sprintf(" (process %d)", pid)
	}
	return nil, fmt.Errorf("another kproxy%s is already running in this network namespace; stop it first, or run this one in a namespace of its own", who)
}

// lockHolder asks the kernel for the process that listens on the lock; 0 if it
// can't be told.
func lockHolder() int {
	c, err := net.Dial("unix", lockName)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	return pid
}
