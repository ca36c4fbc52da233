package userspace

import (
	"context"
	"errors"
	"fmt"
	"hash/crc64"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

// soak is how long TestSoak lasts and with how many clients at a time, from
// KPROXY_SOAK, "2000,10m".
func soak(t *testing.T) (d time.Duration, clients int) {
	d, clients = 2*time.Second, 60
	if v := os.Getenv("KPROXY_SOAK"); v != "" {
		var text string
		if _, err := fmt.Sscanf(v, "%d,%s", &clients, &text); err != nil {
			t.Fatalf("KPROXY_SOAK=%q, want clients and a duration, as in 2000,10m: %v", v, err)
		}
		var err error
		d, err = time.ParseDuration(text)
		must(t, err)
	}
	return d, clients
}

var table64 = crc64.MakeTable(crc64.ECMA)

// TestSoak has clients of every behaviour come and go for a while: who reads
// slowly, finishes first, or resets, beside endpoints that refuse. Every byte of
// those that end in good order is checked, and at the end nothing is left.
func TestSoak(t *testing.T) {
	d, clients := soak(t)
	ep := tcpEndpoint(t, summing)
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep, refusing(t), hanging(t)}}))
	ask := connect(t, s)
	ask.CloseWrite()
	io.ReadAll(ask) // one has been through, so what stays open is open
	before, heap := openFiles(t), heapInUse()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	var done, aborted atomic.Int64
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				err := behave(s, rand.IntN(4))
				switch {
				case err == nil:
					done.Add(1)
				case errors.Is(err, errLeft):
					aborted.Add(1)
				default:
					t.Errorf("client %d: %v", i, err)
					return
				}
			}
		})
	}
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		watchSoak(ctx, t, s, d/10)
	}()
	wg.Wait()
	<-watched
	if done.Load() == 0 || aborted.Load() == 0 {
		t.Errorf("%d ended in good order, %d left; want some of each", done.Load(), aborted.Load())
	}
	eventually(t, "every connection has ended", func() bool { return len(s.live.all()) == 0 && s.Budget(service.TCP).Used == 0 })
	pipes := 2 * len(s.pipes.free)
	eventually(t, "every descriptor is closed", func() bool { return openFiles(t) <= before+pipes })
	after := heapInUse()
	t.Logf("%d connections ended in good order, %d were reset; heap %d kB, %d at the start, %d descriptors (%d of pipes)",
		done.Load(), aborted.Load(), after>>10, heap>>10, openFiles(t), pipes)
	if after > heap+soakKeeps {
		t.Errorf("heap %d kB, %d at the start: something is kept of connections that have ended", after>>10, heap>>10)
	}
}

// soakKeeps is ample for what a server keeps for connections to come: it doesn't
// grow with how many there have been.
const soakKeeps = 16 << 20

// heapInUse is what is reachable, in bytes.
func heapInUse() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what pools hold goes with the second
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// watchSoak logs from time to time what is in use, in a long soak: it must not grow.
// Nothing else checks that before the end.
func watchSoak(ctx context.Context, t *testing.T, s *Server, every time.Duration) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		t.Logf("%d connections, %d descriptors, heap in use %d MB, from the system %d MB", len(s.live.all()), openFiles(t), m.HeapInuse>>20, m.Sys>>20)
	}
}

// summing takes all that a client sends, and answers with as much and its sum.
func summing(c *net.TCPConn) {
	defer c.Close()
	h := crc64.New(table64)
	n, err := io.Copy(h, c)
	if err != nil {
		return
	}
	sent := crc64.New(table64)
	if _, err := io.CopyN(io.MultiWriter(c, sent), rand.NewChaCha8([32]byte{byte(n)}), n); err != nil {
		return
	}
	fmt.Fprintf(c, "%016x%016x", h.Sum64(), sent.Sum64())
}

var errLeft = errors.New("left with a reset")

// behave is one client's connection.
func behave(s *Server, kind int) error {
	tcp, _ := s.Ports()
	c, err := tryDial(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), tcp))
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(15 * patience)) // with hundreds of others, on a busy machine
	size := 1 + rand.IntN(1<<(6+rand.IntN(16)))
	h := crc64.New(table64)
	if _, err := io.CopyN(io.MultiWriter(c, h), rand.NewChaCha8([32]byte{byte(size)}), int64(size)); err != nil {
		return fmt.Errorf("send %d bytes: %w", size, err)
	}
	if kind == 0 {
		c.SetLinger(0)
		return errLeft
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	var in io.Reader = c
	if kind == 1 {
		in = slowly{c}
	}
	b, err := io.ReadAll(in)
	if err != nil || len(b) != size+32 {
		return fmt.Errorf("got %d bytes of %d: %w", len(b), size+32, err)
	}
	if got, want := string(b[size:]), fmt.Sprintf("%016x%016x", h.Sum64(), crc64.Checksum(b[:size], table64)); got != want {
		return fmt.Errorf("sums of %d bytes are %s, want %s", size, got, want)
	}
	return nil
}

// slowly reads with pauses.
type slowly struct{ r io.Reader }

func (s slowly) Read(b []byte) (int, error) {
	time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
	return s.r.Read(b[:min(len(b), 1<<14)])
}

func openFiles(t *testing.T) int {
	t.Helper()
	dir, err := os.Open("/proc/self/fd")
	must(t, err)
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	must(t, err)
	return len(names)
}
