package uring

import (
	"errors"
	"maps"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// open returns a Ring for the test's goroutine.
func open(t *testing.T, c Config) *Ring {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	r, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

var small = Config{Entries: 8, Completions: 16, Buffers: 4, BufferSize: 16}

func pair(t *testing.T) (int, int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fds[0]); unix.Close(fds[1]) })
	return fds[0], fds[1]
}

// result waits for the next one, for a while.
func result(t *testing.T, r *Ring) Result {
	t.Helper()
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		r.Wait(10*time.Millisecond, true)
		if x, ok := r.Next(); ok {
			return x
		}
	}
	t.Fatal("no result came")
	return Result{}
}

func TestReceiveTellsWhatHasCome(t *testing.T) {
	r := open(t, small)
	a, b := pair(t)
	for i := range 40 { // more than there are buffers, entries and places for results
		early := i%2 == 0
		if early {
			unix.Write(b, []byte{byte(i), 7})
		}
		r.Receive(a, 2)
		if !early {
			r.Wait(0, true)
			unix.Write(b, []byte{byte(i), 7})
		}
		x := result(t, r)
		if x.Tag != 2 || x.Err != 0 || x.N != 2 || !x.Bytes.lent || r.Bytes(x.Bytes)[0] != byte(i) {
			t.Fatalf("turn %d: %+v", i, x)
		}
		r.Return(x.Bytes)
	}
}

// tcpPair returns both ends of a TCP connection over loopback.
func tcpPair(t *testing.T) (int, int) {
	t.Helper()
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(l)
	if err := unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	unix.Listen(l, 1)
	at, _ := unix.Getsockname(l)
	a, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err == nil {
		err = unix.Connect(a, at)
	}
	if err != nil {
		t.Fatal(err)
	}
	b, _, err := unix.Accept4(l, unix.SOCK_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	unix.SetNonblock(a, true)
	t.Cleanup(func() { unix.Close(a); unix.Close(b) })
	return a, b
}

func TestReceiveTellsHowASocketEnded(t *testing.T) {
	for _, test := range []struct {
		name string
		end  func(fd int)
		want unix.Errno
	}{
		{"end of data", func(fd int) { unix.Shutdown(fd, unix.SHUT_WR) }, 0},
		{"reset", func(fd int) {
			unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
			disconnect(fd)
		}, unix.ECONNRESET},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := open(t, small)
			a, b := tcpPair(t)
			r.Receive(a, 5)
			r.Wait(0, true)
			test.end(b)
			x := result(t, r)
			if x.Tag != 5 || x.N != 0 || x.Err != test.want {
				t.Errorf("%+v, want %v", x, test.want)
			}
			r.Return(x.Bytes)
		})
	}
}

// disconnect resets a connection without closing its descriptor (tcp_disconnect in
// net/ipv4/tcp.c).
func disconnect(fd int) {
	unspecified := [16]byte{}
	unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unspecified)), 16)
}

// A receive that is cancelled has one result, and a second receive gets what comes.
func TestCancel(t *testing.T) {
	r := open(t, small)
	a, b := tcpPair(t)
	r.Receive(a, 1)
	r.Wait(0, true)
	r.Cancel(1, 2)
	results := map[uint64]unix.Errno{}
	for range 2 {
		x := result(t, r)
		results[x.Tag] = x.Err
	}
	if want := map[uint64]unix.Errno{1: unix.ECANCELED, 2: 0}; !maps.Equal(results, want) {
		t.Fatalf("results %v, want %v", results, want)
	}
	r.Wait(20*time.Millisecond, true)
	if x, ok := r.Next(); ok {
		t.Fatalf("one more result: %+v", x)
	}
	unix.Write(b, []byte("x"))
	r.Receive(a, 3)
	if x := result(t, r); x.Tag != 3 || x.N != 1 {
		t.Errorf("%+v, want one byte", x)
	}
}

// Who has no buffer is told so; with one, it goes on.
func TestReceiveWithoutBuffers(t *testing.T) {
	r := open(t, small)
	a, b := tcpPair(t)
	var lent []Buffer
	for range small.Buffers {
		unix.Write(b, []byte("x"))
		r.Receive(a, 1)
		x := result(t, r)
		if x.N != 1 {
			t.Fatalf("%+v, want one byte", x)
		}
		lent = append(lent, x.Bytes)
	}
	unix.Write(b, []byte("y"))
	r.Receive(a, 1)
	if x := result(t, r); x.Err != unix.ENOBUFS {
		t.Fatalf("%+v, want %v", x, unix.ENOBUFS)
	}
	for _, l := range lent {
		r.Return(l)
	}
	r.Receive(a, 1)
	if x := result(t, r); x.N != 1 || r.Bytes(x.Bytes)[0] != 'y' {
		t.Errorf("%+v, want y", x)
	}
}

// A send takes what goes, and waits for nothing.
func TestSend(t *testing.T) {
	r := open(t, Config{Entries: 8, Completions: 16, Buffers: 2, BufferSize: 1 << 16})
	a, b := pair(t)
	unix.Write(b, []byte("to be sent"))
	r.Receive(a, 1)
	x := result(t, r)
	r.Send(a, r.Bytes(x.Bytes)[:x.N], 2)
	if y := result(t, r); y.Tag != 2 || y.N != x.N {
		t.Fatalf("%+v, want %d bytes", y, x.N)
	}
	got := make([]byte, 100)
	if n, err := unix.Read(b, got); err != nil || string(got[:n]) != "to be sent" {
		t.Fatalf("%q came, %v", got[:max(n, 0)], err)
	}
	for turn := 0; ; turn++ {
		r.Send(a, r.Bytes(x.Bytes), 3)
		y := result(t, r)
		if y.Err == unix.EAGAIN {
			break
		}
		if y.Err != 0 || turn > 1000 {
			t.Fatalf("turn %d: %+v, want %v in the end", turn, y, unix.EAGAIN)
		}
	}
	r.Return(x.Bytes)
}

// More requests than there are entries are handed over in several parts.
func TestManyRequests(t *testing.T) {
	r := open(t, small)
	const n = 40
	var ends [n]int
	for i := range n {
		a, b := pair(t)
		ends[i] = b
		r.Receive(a, uint64(i))
	}
	r.Wait(0, true)
	for i := range n {
		unix.Write(ends[n-1-i], []byte{1})
		if x := result(t, r); x.Tag != uint64(n-1-i) || x.N != 1 {
			t.Fatalf("%+v, want one byte for %d", x, n-1-i)
		} else {
			r.Return(x.Bytes)
		}
	}
}

func TestPollTellsOfEpoll(t *testing.T) {
	r := open(t, small)
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(epoll)
	a, b := pair(t)
	unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, a, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: 9})
	for range 3 {
		r.Poll(epoll, 1)
		r.Wait(5*time.Millisecond, true)
		if x, ok := r.Next(); ok {
			t.Fatalf("%+v before there is anything", x)
		}
		unix.Write(b, []byte("x"))
		if x := result(t, r); x.Tag != 1 || x.Err != 0 {
			t.Fatalf("%+v", x)
		}
		events := make([]unix.EpollEvent, 2)
		if n, err := unix.EpollWait(epoll, events, 0); n != 1 || events[0].Fd != 9 {
			t.Fatalf("epoll has %d events, %v", n, err)
		}
	}
}

// When the kernel refuses for good to take what is asked for, nothing waits for it.
func TestFailureIsFinal(t *testing.T) {
	r := open(t, small)
	a, b := pair(t)
	fd := r.fd
	r.fd = -1
	for range 3 * small.Entries {
		r.Receive(a, 2)
		r.Send(b, []byte{1}, 4)
		r.Cancel(2, 6)
	}
	r.Wait(-1, false)
	if err := r.Err(); !errors.Is(err, unix.EBADF) {
		t.Errorf("Err() = %v, want %v", err, unix.EBADF)
	}
	r.fd = fd
}
