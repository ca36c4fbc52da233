package e2e

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
)

// ownPort is where a test's own server listens on a backend.
const ownPort = 9100

// serveOn serves connections on a backend, and returns a manifest of a service
// of that backend's server.
func (w *world) serveOn(b *lab.Backend, name string, number int, serve func(*net.TCPConn)) lab.Manifest {
	w.Helper()
	l, err := b.Namespace.Listen(w.ctx, "tcp", ":9100")
	w.must(err)
	w.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c.(*net.TCPConn))
			}()
		}
	}()
	m := newManifest(name, number, b)
	m.Ports = []lab.ManifestPort{{Name: "own", Port: 80, Target: ownPort}}
	return m
}

// echoAndHash answers with what it gets, and, once that has ended, with its hash.
func echoAndHash(c *net.TCPConn) {
	h := sha256.New()
	if _, err := io.Copy(io.MultiWriter(c, h), c); err == nil {
		_, _ = c.Write(h.Sum(nil)) // if it fails, the client sees
	}
}

// TestStreamsAreWhole: what both ends send arrives whole, in both directions at
// once; the end of one direction is passed on and doesn't end the other.
func TestStreamsAreWhole(t *testing.T) {
	w := newWorld(t)
	m := w.serveOn(w.net.Backends[0], "own", 10, echoAndHash)
	w.must(m.Write(w.manifests))
	w.start()
	sent := make([]byte, 8<<20)
	_, _ = rand.Read(sent)
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("own", "own", plane)
		for _, target := range frontends(m) {
			c, err := w.net.Client.Dial(w.ctx, "tcp", target.String())
			w.must(err)
			w.must(c.SetDeadline(time.Now().Add(within(30 * time.Second))))
			go func() {
				_, _ = c.Write(sent) // if it fails, what comes back is short
				_ = c.(*net.TCPConn).CloseWrite()
			}()
			got, err := io.ReadAll(c)
			c.Close()
			hash := sha256.Sum256(sent)
			if err != nil || !bytes.Equal(got, append(bytes.Clone(sent), hash[:]...)) {
				t.Errorf("%s to %s: %d of %d bytes came back as they were: %v", plane, target, len(got), len(sent)+len(hash), err)
			}
		}
	}
}

// TestResetsOfClients: a client that resets its connection resets that of the
// endpoint, which would otherwise take the end for a regular one.
func TestResetsOfClients(t *testing.T) {
	w := newWorld(t)
	ends := make(chan error, 1)
	m := w.serveOn(w.net.Backends[0], "own", 10, func(c *net.TCPConn) {
		_, _ = c.Write([]byte("x"))
		_, err := io.Copy(io.Discard, c)
		ends <- err
	})
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("own", "own", plane)
		for _, target := range frontends(m) {
			c, err := w.net.Client.Dial(w.ctx, "tcp", target.String())
			w.must(err)
			_, err = io.ReadFull(c, make([]byte, 1)) // it has reached the endpoint
			w.must(err)
			w.must(c.(*net.TCPConn).SetLinger(0)) // close sends RST (tcp(7))
			w.must(c.Close())
			select {
			case err := <-ends:
				if err == nil || !strings.Contains(err.Error(), "reset") {
					t.Errorf("%s to %s: the endpoint saw %v, want a reset", plane, target, err)
				}
			case <-time.After(within(10 * time.Second)):
				t.Errorf("%s to %s: the endpoint saw no end", plane, target)
			}
		}
	}
}

// TestProxyProtocol: an endpoint that asks for it learns the client's address
// and port, and its service stays in userspace.
func TestProxyProtocol(t *testing.T) {
	w := newWorld(t)
	seen := make(chan string, 1)
	m := w.serveOn(w.net.Backends[0], "own", 10, func(c *net.TCPConn) {
		line, err := bufio.NewReader(c).ReadString('\n')
		if err == nil {
			seen <- line
			_, err = c.Write([]byte("x"))
		}
		if err != nil && !errors.Is(err, net.ErrClosed) {
			seen <- err.Error()
		}
	})
	w.must(m.Annotate("kproxy.dev/proxy-protocol", "v1").Write(w.manifests))
	w.start("--health-check", "off", "--offload-after", "0s")
	for i, target := range frontends(m) {
		c, err := w.net.Client.Dial(w.ctx, "tcp", target.String())
		w.must(err)
		_, err = c.Write([]byte("hello\n"))
		w.must(err)
		client := c.LocalAddr().(*net.TCPAddr).AddrPort()
		want := "PROXY " + []string{"TCP4", "TCP6"}[i] + " " + client.Addr().String() + " " + target.Addr().String() + " "
		select {
		case line := <-seen:
			if !strings.HasPrefix(line, want) || !strings.HasSuffix(line, " 80\r\n") {
				t.Errorf("%s: the endpoint read %q, want %q", target, line, want)
			}
		case <-time.After(within(10 * time.Second)):
			t.Errorf("%s: the endpoint read nothing", target)
		}
		c.Close()
	}
	if s := w.service("own", "own"); s.DataPlane != "userspace" || !strings.Contains(s.Reason, "PROXY") {
		t.Errorf("it is in %s: %s; want userspace because of the PROXY protocol", s.DataPlane, s.Reason)
	}
}
