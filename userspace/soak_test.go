package userspace

import (
	"bytes"
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
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// soak returns how long a soak lasts and how many clients it has at a time, from
// KPROXY_SOAK, as in "2000,10m".
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
// slowly, finishes first, resets, or is reset, beside endpoints that refuse and that don't
// answer. Every byte is checked, of those that end in a reset as far as they came;
// meanwhile memory and descriptors stay what they were, and at the end nothing is left.
func TestSoak(t *testing.T) {
	d, clients := soak(t)
	var far soakEndpoint
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, far.serve), refusing(t), hanging(t)}}))
	if err := behave(s, finishes); err != nil { // one has been through, so what stays open is open
		t.Fatal(err)
	}
	before, heap := openFiles(t), heapInUse()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	var ended [behaviours]atomic.Int64
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				kind := behaviour(rand.IntN(int(behaviours)))
				if err := behave(s, kind); err != nil {
					t.Errorf("client %d, who %s: %v", i, kind, err)
					return
				}
				ended[kind].Add(1)
			}
		})
	}
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		watchSoak(ctx, t, s, d/soakLooks)
	}()
	wg.Wait()
	<-watched
	var counts []string
	for kind := range behaviours {
		counts = append(counts, fmt.Sprintf("%d who %s", ended[kind].Load(), kind))
		if ended[kind].Load() == 0 {
			t.Errorf("there was no client who %s", kind)
		}
	}
	if n := far.wrong.Load(); n > 0 {
		t.Errorf("the endpoint got wrong bytes on %d connections", n)
	}
	eventually(t, "every connection has ended", func() bool { return len(s.live.all()) == 0 && s.Budget(service.TCP).Used == 0 })
	pipes := 2 * len(s.pipes.free)
	eventually(t, "every descriptor is closed", func() bool { return openFiles(t) <= before+pipes })
	after := heapInUse()
	t.Logf("%s; heap %d kB, %d at the start, %d descriptors (%d of pipes)", strings.Join(counts, ", "), after>>10, heap>>10, openFiles(t), pipes)
	if after > heap+soakKeeps {
		t.Errorf("heap %d kB, %d at the start: something is kept of connections that have ended", after>>10, heap>>10)
	}
}

// soakKeeps is ample for what a server keeps for connections to come: it doesn't
// grow with how many there have been.
const soakKeeps = 16 << 20

// heapInUse returns how many bytes of the heap are reachable.
func heapInUse() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what pools hold goes with the second
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// soakLooks is how often a soak is looked at: what the last third of the looks sees is no
// more than what the first had seen.
const soakLooks = 12

// soakUse holds what a process uses.
type soakUse struct {
	descriptors int
	system      uint64 // bytes of memory
}

func (u soakUse) max(other soakUse) soakUse {
	return soakUse{max(u.descriptors, other.descriptors), max(u.system, other.system)}
}

// watchSoak fails when what is in use grows.
func watchSoak(ctx context.Context, t *testing.T, s *Server, every time.Duration) {
	var uses []soakUse
	look := time.NewTicker(every)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			if every > 5*time.Second { // in less than a minute what comes at the start is still growing
				checkSoak(t, uses)
			}
			return
		case <-look.C:
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		uses = append(uses, soakUse{openFiles(t), m.Sys - m.HeapReleased})
		t.Logf("%d connections, %d descriptors, heap in use %d MB, from the system %d MB", len(s.live.all()), openFiles(t), m.HeapInuse>>20, (m.Sys-m.HeapReleased)>>20)
	}
}

// checkSoak leaves room for chance: half as many descriptors more, as they come and go
// with the connections of the moment, and half of the memory and what is ample.
func checkSoak(t *testing.T, uses []soakUse) {
	var first, last soakUse
	for _, u := range uses[:len(uses)/3] {
		first = first.max(u)
	}
	for _, u := range uses[len(uses)-len(uses)/3:] {
		last = last.max(u)
	}
	if last.descriptors > first.descriptors*3/2 || last.system > first.system*3/2+soakKeeps {
		t.Errorf("first there were %d descriptors and %d MB in use, last %d and %d: they grow", first.descriptors, first.system>>20, last.descriptors, last.system>>20)
	}
}

// behaviour says what a client of the soak does. The client's first byte tells the endpoint.
type behaviour uint8

const (
	resets    behaviour = iota // when it has sent everything
	readsSlow                  // after it has finished
	finishes
	isReset // by the endpoint, when that has got some
	behaviours
)

func (b behaviour) String() string {
	return [...]string{"resets", "reads slowly", "finishes first", "is reset"}[b]
}

// stream returns what a client sends after its first two bytes, which are its behaviour and this seed.
func stream(seed byte) io.Reader { return rand.NewChaCha8([32]byte{seed}) }

// soakEndpoint checks what clients send, and answers with as much of a stream of its
// own and the sums of both.
type soakEndpoint struct{ wrong atomic.Int64 }

func (e *soakEndpoint) serve(c *net.TCPConn) {
	defer c.Close()
	var head [2]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return
	}
	h := crc64.New(table64)
	got := checker{want: stream(head[1])}
	defer func() {
		if got.wrong {
			e.wrong.Add(1)
		}
	}()
	if behaviour(head[0]) == isReset {
		io.CopyN(&got, c, 1+rand.Int64N(1<<16))
		c.SetLinger(0)
		return
	}
	n, err := io.Copy(io.MultiWriter(&got, h), c)
	if err != nil {
		return
	}
	sent := crc64.New(table64)
	if _, err := io.CopyN(io.MultiWriter(c, sent), stream(byte(n)), n); err != nil {
		return
	}
	fmt.Fprintf(c, "%016x%016x", h.Sum64(), sent.Sum64())
}

// checker compares what is written with what is wanted.
type checker struct {
	want  io.Reader
	wrong bool
}

func (c *checker) Write(b []byte) (int, error) {
	want := make([]byte, len(b))
	io.ReadFull(c.want, want)
	c.wrong = c.wrong || !bytes.Equal(b, want)
	return len(b), nil
}

// behave is one client's connection, of any size up to 2 MB.
func behave(s *Server, kind behaviour) error {
	tcp, _ := s.Ports()
	c, err := tryDial(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), tcp))
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(lifetime)) // with hundreds of others, on a busy machine
	size, seed := 1+rand.IntN(1<<(6+rand.IntN(16))), byte(rand.Int())
	h := crc64.New(table64)
	_, err = c.Write([]byte{byte(kind), seed})
	if err == nil {
		_, err = io.CopyN(io.MultiWriter(c, h), stream(seed), int64(size))
	}
	switch {
	case kind == isReset:
		return wantReset(c, err)
	case err != nil:
		return fmt.Errorf("send %d bytes: %w", size, err)
	case kind == resets:
		return c.SetLinger(0)
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	var in io.Reader = c
	if kind == readsSlow {
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

// wantReset waits for the endpoint's reset, unless sending has met it.
func wantReset(c *net.TCPConn, err error) error {
	if err == nil {
		if err = c.CloseWrite(); err == nil {
			_, err = c.Read(make([]byte, 1))
		}
	}
	if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ENOTCONN) {
		return fmt.Errorf("it met %v, want the endpoint's reset", err)
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
