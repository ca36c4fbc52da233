package terminal

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/view"
)

// escapeWait is how many milliseconds the rest of a key's sequence may take. An
// Escape that is alone for longer is the key of that name.
const escapeWait = 50

// reader reads keys from a terminal on a goroutine of its own, until it is
// stopped: a read that blocks couldn't be ended, so it polls.
type reader struct {
	in   *os.File
	wake [2]int // a pipe; closing its write end stops the goroutine
	keys chan view.Key
	err  error // why keys was closed; set before
	done chan struct{}
}

func startReader(in *os.File) (*reader, error) {
	r := &reader{in: in, keys: make(chan view.Key, 16), done: make(chan struct{})}
	if err := unix.Pipe2(r.wake[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("make pipe: %w", err)
	}
	go func() {
		defer close(r.done)
		defer close(r.keys)
		r.err = r.read()
	}()
	return r, nil
}

// stop ends the goroutine and waits until it has.
func (r *reader) stop() {
	_ = unix.Close(r.wake[1])
	for range r.keys { // it may wait to send
	}
	<-r.done
	_ = unix.Close(r.wake[0])
}

func (r *reader) read() error {
	var pending []byte
	buf := make([]byte, 256)
	for {
		timeout := -1
		if len(pending) > 0 {
			timeout = escapeWait
		}
		ready, stopped, err := r.poll(timeout)
		switch {
		case err != nil:
			return err
		case stopped:
			return nil
		case !ready: // no more of a sequence came
			pending = r.send(pending, true)
			continue
		}
		n, err := unix.Read(int(r.in.Fd()), buf)
		switch {
		case errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return fmt.Errorf("read from terminal: %w", err)
		case n == 0:
			return io.EOF
		}
		pending = r.send(append(pending, buf[:n]...), false)
	}
}

// send passes on the keys in b and returns what isn't a whole key yet.
func (r *reader) send(b []byte, all bool) []byte {
	for len(b) > 0 {
		k, n := parseKey(b, all)
		if n == 0 {
			return b
		}
		if k != "" {
			r.keys <- k
		}
		b = b[n:]
	}
	return nil
}

func (r *reader) poll(timeout int) (ready, stopped bool, err error) {
	fds := []unix.PollFd{{Fd: int32(r.in.Fd()), Events: unix.POLLIN}, {Fd: int32(r.wake[0]), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, timeout)
	switch {
	case errors.Is(err, unix.EINTR):
		return false, false, nil
	case err != nil:
		return false, false, fmt.Errorf("wait for terminal: %w", err)
	case fds[1].Revents != 0:
		return false, true, nil
	}
	return n > 0 && fds[0].Revents != 0, false, nil
}
