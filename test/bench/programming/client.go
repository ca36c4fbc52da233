package programming

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// answer holds what a connection met.
type answer struct {
	start     time.Time // of the connection
	side      int       // the backend that has the endpoint
	userspace bool      // a proxy opened a connection of its own
}

// ask connects, reads the backend's greeting, and resets the connection, so that
// no port waits (TIME_WAIT). It has to be called in the client's namespace.
func ask(to netip.AddrPort, patience time.Duration) (a answer, err error) {
	for {
		a, err = askOnce(to, patience)
		// Signals of Go's scheduler: with a time-out, calls aren't restarted (signal(7)).
		if !errors.Is(err, unix.EINTR) {
			return a, err
		}
	}
}

func askOnce(to netip.AddrPort, patience time.Duration) (a answer, err error) {
	a.start = time.Now()
	fd, err := connect(to, patience)
	if err != nil {
		return a, err
	}
	defer reset(fd)
	var b [32]byte
	n, err := unix.Read(fd, b[:])
	if err != nil {
		return a, fmt.Errorf("read from %s: %w", to, err)
	}
	var port int
	if _, err := fmt.Sscanf(string(b[:n]), "%d %d\n", &a.side, &port); err != nil {
		return a, fmt.Errorf("read from %s: %q: %w", to, strings.TrimSpace(string(b[:n])), err)
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		return a, fmt.Errorf("read own address: %w", err)
	}
	in, ok := local.(*unix.SockaddrInet4)
	a.userspace = ok && in.Port != port
	return a, nil
}

// connect opens a blocking connection; SO_SNDTIMEO bounds it as well (socket(7)).
func connect(to netip.AddrPort, patience time.Duration) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	t := unix.NsecToTimeval(int64(patience))
	err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &t), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &t))
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connect to %s: %w", to, err)
	}
	return fd, nil
}

func reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	_ = unix.Close(fd)
}

// askPause leaves the processors to who is measured.
const askPause = 300 * time.Microsecond

// follow asks a service until its connections get to side, checks that they stay
// there, and returns when the first of them began.
func follow(ctx context.Context, to netip.AddrPort, right func(answer) bool) (time.Time, error) {
	var first time.Time
	var last error
	for seen := 0; seen < confirmations; time.Sleep(askPause) {
		if ctx.Err() != nil {
			return first, errors.Join(fmt.Errorf("wait until connections to %s follow: %w", to, ctx.Err()), last)
		}
		a, err := ask(to, time.Second)
		switch {
		case err == nil && right(a):
			if seen++; seen == 1 {
				first = a.start
			}
		case seen > 0:
			return first, errors.Join(fmt.Errorf("after a connection to %s had followed, another didn't: it met side %d, in userspace: %t", to, a.side, a.userspace), err)
		default:
			last = err
		}
	}
	return first, nil
}

// confirmations is how many connections in a row have to follow.
const confirmations = 10

// connectTimes measures count connects, to one target after the other.
func connectTimes(count int, target func(i int) netip.AddrPort) ([]float64, error) {
	out := make([]float64, 0, count)
	for i := range count {
		to := target(i)
		start := time.Now()
		fd, err := connect(to, time.Second)
		took := time.Since(start)
		if errors.Is(err, unix.EINTR) {
			continue // as in ask
		}
		if err != nil {
			return nil, err
		}
		reset(fd)
		out = append(out, float64(took)/1e3)
	}
	return out, nil
}
