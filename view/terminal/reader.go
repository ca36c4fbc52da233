package terminal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/view"
)

// escapeWait is how long the rest of a key's sequence may take. An Escape that is alone
// for longer is the key of that name.
const escapeWait = 50 * time.Millisecond

// reader reads keys from a terminal. Its first goroutine stays in a read that blocks
// until a key is pressed or the terminal goes; what it reads after stop is lost.
type reader struct {
	keys chan view.Key
	err  error // why keys was closed; set before
	done chan struct{}
}

func startReader(in *os.File) *reader {
	r := &reader{keys: make(chan view.Key), done: make(chan struct{})}
	input := make(chan []byte)
	go func() {
		defer close(input)
		for {
			buf := make([]byte, 256)
			n, err := in.Read(buf)
			switch {
			case ready(in, unix.POLLIN, err):
				continue
			case err == nil && n == 0:
				err = io.EOF
			}
			if err != nil {
				r.err = fmt.Errorf("read from terminal: %w", err)
				return
			}
			select {
			case input <- buf[:n]:
			case <-r.done:
				return
			}
		}
	}()
	go r.parse(input)
	return r
}

// ready waits until f can be read or written again, if err says that it can't be now: another
// process with the same terminal may have set O_NONBLOCK on it, which is a flag of the open
// file that they share.
func ready(f *os.File, events int16, err error) bool {
	if !errors.Is(err, unix.EAGAIN) {
		return false
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(f.Fd()), Events: events}}, -1)
	return err == nil || errors.Is(err, unix.EINTR)
}

// stop ends parsing; no key comes after it.
func (r *reader) stop() { close(r.done) }

// parse makes keys of what is read.
func (r *reader) parse(input <-chan []byte) {
	defer close(r.keys)
	var pending []byte
	for {
		var late <-chan time.Time
		if len(pending) > 0 {
			late = time.After(escapeWait)
		}
		all := false
		select {
		case <-r.done:
			return
		case b, open := <-input:
			if !open {
				return
			}
			pending = append(pending, b...)
		case <-late: // no more of a sequence came
			all = true
		}
		for len(pending) > 0 {
			k, n := parseKey(pending, all)
			if n == 0 {
				break
			}
			if pending = pending[n:]; k == "" {
				continue
			}
			select {
			case r.keys <- k:
			case <-r.done:
				return
			}
		}
	}
}
