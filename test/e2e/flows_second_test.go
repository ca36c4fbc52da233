package e2e

import (
	"fmt"
	"net"
	"net/netip"

	"kproxy.dev/kproxy/lab"
)

// secondPort is another port than [lab.LinePort] that endpoints of flows answer on, TCP
// and UDP, by the name [second].
const secondPort = lab.LinePort + 1

func second(backend string) string { return backend + "-second" }

// serveSecond has b answer there one line of each connection, and every datagram, until
// the test ends.
func (w *flowWorld) serveSecond(b *lab.Backend) {
	w.Helper()
	address := fmt.Sprintf(":%d", secondPort)
	l, err := b.Namespace.Listen(w.ctx, "tcp", address)
	w.must(err)
	pc, err := b.Namespace.ListenPacket(w.ctx, "udp", address)
	w.must(err)
	w.Cleanup(func() { l.Close(); pc.Close() })
	answer := func(peer net.Addr, line []byte) []byte {
		return fmt.Appendf(nil, "%s %s %s", second(b.Name), netip.MustParseAddrPort(peer.String()).Addr().Unmap(), line)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, 100)
				if n, err := c.Read(buf); err == nil {
					_, _ = c.Write(answer(c.RemoteAddr(), buf[:n]))
				}
			}()
		}
	}()
	go func() {
		buf := make([]byte, 100)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(answer(from, buf[:n]), from)
		}
	}()
}
