package proxies

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
)

// Copy is a proxy of two goroutines for each connection with io.Copy, which
// splices where the kernel can. It serves TCP.
func Copy(ctx context.Context, c Config, serving func()) error {
	var listeners []net.Listener
	for _, port := range c.TCP {
		l, err := net.Listen("tcp4", netip.AddrPortFrom(c.Listen, port).String())
		if err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		defer l.Close()
		listeners = append(listeners, l)
		go accept(l, netip.AddrPortFrom(c.To, port).String())
	}
	if len(listeners) == 0 {
		return errors.New("serve: no ports")
	}
	serving()
	<-ctx.Done()
	return nil
}

func accept(l net.Listener, to string) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			go relay(c, to)
		}
	}
}

func relay(client net.Conn, to string) {
	defer client.Close()
	server, err := net.Dial("tcp4", to)
	if err != nil {
		return
	}
	defer server.Close()
	var wg sync.WaitGroup
	wg.Go(func() { pass(server, client) })
	pass(client, server)
	wg.Wait()
}

// pass passes bytes on, and the end.
func pass(to, from net.Conn) {
	_, _ = io.Copy(to, from) // whatever ended it: the other side sees the end
	_ = to.(*net.TCPConn).CloseWrite()
}
