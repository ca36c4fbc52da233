package lab

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"
)

// outcome says what a client sees, in one word.
func outcome(err error) string {
	var timeout net.Error
	switch {
	case err == nil:
		return "answered"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.ECONNRESET):
		return "reset"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	}
	return err.Error()
}

func TestFaults(t *testing.T) {
	n := build(t, dualStack("kplab-fault", 1))
	b := n.Backends[0]
	cases := []struct {
		fault    Fault
		tcp, udp string
	}{
		{Healthy, "answered", "answered"},
		{Refuse, "refused", "refused"},
		{Hang, "timeout", "timeout"},
		{Reset, "reset", "answered"},
		{Silent, "timeout", "timeout"},
		{Failing, "answered", "answered"},
		{Hang, "timeout", "timeout"}, // again, from another state
		{Healthy, "answered", "answered"},
	}
	for _, c := range cases {
		if err := b.Fail(t.Context(), c.fault); err != nil {
			t.Fatalf("Fail(%s): %v", c.fault, err)
		}
		for _, ipv6 := range []bool{false, true} {
			for network, want := range map[string]string{"tcp": c.tcp, "udp": c.udp} {
				patience := 5 * time.Second
				if want == "timeout" {
					patience = 50 * time.Millisecond
				}
				_, err := n.Client.Ask(within(t, patience), network, b.Address(ipv6, LinePort), "x")
				if got := outcome(err); got != want {
					t.Errorf("%s, %s, IPv6 %v: got %s, want %s", c.fault, network, ipv6, got, want)
				}
			}
		}
	}
}

func TestOpenConnectionsOutliveFaults(t *testing.T) {
	n := build(t, dualStack("kplab-open", 1))
	b := n.Backends[0]
	c, err := n.Client.Dial(within(t, 5*time.Second), "tcp", b.Address(true, LinePort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, f := range []Fault{Healthy, Refuse, Reset, Healthy} {
		if err := b.Fail(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		if _, err := exchange(c, "tcp", f.String()); err != nil {
			t.Errorf("exchange under %s: %v", f, err)
		}
	}
	b.Stop()
	if _, err := exchange(c, "tcp", "x"); err == nil {
		t.Error("exchange with a stopped backend: got no error")
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Client.Ask(within(t, 5*time.Second), "tcp", b.Address(false, LinePort), "x"); err != nil {
		t.Errorf("after Start: %v", err)
	}
}

func TestHTTP(t *testing.T) {
	n := build(t, dualStack("kplab-http", 1))
	b := n.Backends[0]
	for _, c := range []struct {
		fault  Fault
		status int
	}{{Healthy, 200}, {Failing, 500}} {
		if err := b.Fail(t.Context(), c.fault); err != nil {
			t.Fatal(err)
		}
		client := http.Client{Transport: &http.Transport{DialContext: n.Client.Dial}, Timeout: 5 * time.Second}
		for range 2 { // the second on the same connection
			res, err := client.Get(fmt.Sprintf("http://%s/some/path", b.Address(true, HTTPPort)))
			if err != nil {
				t.Fatal(err)
			}
			line, _ := bufio.NewReader(res.Body).ReadString('\n')
			res.Body.Close()
			if want := "b1 fd00:1::2 /some/path\n"; res.StatusCode != c.status || line != want {
				t.Errorf("%s: got %d %q, want %d %q", c.fault, res.StatusCode, line, c.status, want)
			}
		}
		client.CloseIdleConnections()
	}
}

func TestLargestDatagram(t *testing.T) {
	n := build(t, dualStack("kplab-large", 1))
	payload := make([]byte, MaxDatagram)
	for i := range payload {
		payload[i] = 'a' + byte(i%26)
	}
	for _, a := range n.Backends[0].Addresses {
		got, err := n.Client.Ask(within(t, 5*time.Second), "udp", netip.AddrPortFrom(a, LinePort), string(payload))
		if err != nil {
			t.Fatalf("to %s: %v", a, err)
		}
		rest := len("b1 ") + len(got.Peer.String()) + len(" ")
		if want := string(payload[:MaxDatagram-rest]); got.Payload != want {
			t.Errorf("to %s: answer has %d bytes of payload, or other ones; want the first %d", a, len(got.Payload), len(want))
		}
	}
}
