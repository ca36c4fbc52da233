package main

import (
	"bufio"
	"net"
	"path/filepath"
	"testing"

	"kproxy.dev/kproxy/trace"
	"kproxy.dev/kproxy/web"
)

// TestTraceOfADyingKproxy: a kproxy that hangs up is as good as none.
func TestTraceOfADyingKproxy(t *testing.T) {
	for name, unread := range map[string]bool{"with the question unread": true, "having read it": false} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					if !unread {
						_, _ = bufio.NewReader(c).ReadString('\n')
					}
					c.Close()
				}
			}()
			_, err = web.NewClient(socket).Trace(t.Context(), trace.Request{})
			if err == nil || !notAnswering(err) {
				t.Errorf("error %v, want one that says that nobody answers", err)
			}
		})
	}
}
