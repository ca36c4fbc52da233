package traffic

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Hold opens n TCP connections that have had one exchange each, calls holding,
// and keeps them until ctx ends. It fails when one of them didn't last.
func Hold(ctx context.Context, target netip.AddrPort, n int, holding func()) error {
	l := Load{Kind: Exchange, Target: target}
	w := newExchanger(&l, n)
	defer w.close()
	if err := w.open(); err != nil {
		return fmt.Errorf("open connection %d of %d: %w", len(w.fds)+1, n, err)
	}
	for i := range w.slots {
		w.ask(i, time.Now())
	}
	left := n
	for deadline := time.Now().Add(10 * time.Second); left > 0 && w.failed == 0 && time.Now().Before(deadline); {
		for _, e := range w.poll.wait(50) {
			w.readable(int(e.Fd), false)
		}
		left = w.pending()
	}
	if w.failed > 0 || left > 0 {
		return fmt.Errorf("open %d connections: %d don't answer: %w", n, w.failed+left, cmp.Or(w.err, errNoAnswer))
	}
	holding()
	<-ctx.Done()
	for i, fd := range w.fds {
		var b [1]byte
		if _, e := read(fd, b[:]); e != unix.EAGAIN {
			return fmt.Errorf("connection %d of %d didn't last: %w", i+1, n, e)
		}
	}
	return nil
}

// pending is how many requests have no answer yet.
func (w *exchanger) pending() (n int) {
	for i := range w.slots {
		if !w.slots[i].sent.IsZero() {
			n++
		}
	}
	return n
}
