package programming

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"

	"kproxy.dev/kproxy/lab"
)

// serverPort is where every endpoint answers.
const serverPort uint16 = 9100

// server is the endpoints at one backend.
type server struct {
	listener net.Listener
	// serving is held while connections are accepted. To hold it lets them wait in
	// the kernel's queue: the client doesn't notice, and accepting them uses no
	// processor time while connects are measured.
	serving sync.Mutex
}

// serve has a backend answer at every address that it owns with its side and the
// port that the connection came from, which a proxy in userspace has chosen, and
// then wait until the client closes.
func serve(ctx context.Context, b *lab.Backend, side int) (*server, error) {
	l, err := b.Namespace.Listen(ctx, "tcp4", net.JoinHostPort("0.0.0.0", strconv.Itoa(int(serverPort))))
	if err != nil {
		return nil, fmt.Errorf("serve at backend %s: %w", b.Name, err)
	}
	s := &server{listener: l}
	go func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			s.serving.Lock()
			s.serving.Unlock() //lint:ignore SA2001 it only waits while connects are measured
			if err == nil {
				go greet(c, side)
			}
		}
	}()
	return s, nil
}

func greet(c net.Conn, side int) {
	defer c.Close()
	_, port, _ := net.SplitHostPort(c.RemoteAddr().String())
	if _, err := fmt.Fprintf(c, "%d %s\n", side, port); err == nil {
		var b [1]byte
		_, _ = c.Read(b[:]) // until the client has gone
	}
}
