package passive

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// TestProbeEndsInGoodOrder: a server that is asked sees a client that connects and leaves, not one that resets.
func TestProbeEndsInGoodOrder(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ended := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			_, err = c.Read(make([]byte, 1))
		}
		ended <- err
	}()
	at := health.Endpoint{Protocol: service.TCP, Address: netip.MustParseAddrPort(l.Addr().String())}
	if got := (Network{}).Endpoint(t.Context(), at); got != Accepts {
		t.Errorf("the answer is %v, want %v", got, Accepts)
	}
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("the server saw the connection end with %v, want %v", err, io.EOF)
	}
}
