package handover

import (
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
)

const patience = 10 * time.Second

// pair returns the two ends of a connection.
func pair(t *testing.T) (*net.UnixConn, *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// TestConn: messages come as they were sent, each with its descriptors in their order, more of them than one message
// of a Unix socket has.
func TestConn(t *testing.T) {
	a, b := pair(t)
	var files []int
	for range 600 {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		defer w.Close()
		files = append(files, int(r.Fd()))
	}
	sent := make(chan error, 2)
	go func() {
		c := NewConn(a)
		sent <- c.Send(patience, &Welcome{Steering: "x", Files: []File{{Name: "lock", File: 600}}}, files...)
		sent <- c.Send(patience, &Ask{Step: Give})
	}()
	c := NewConn(b)
	var welcome Welcome
	got, err := c.Receive(patience, &welcome)
	if err != nil {
		t.Fatal(err)
	}
	defer CloseFiles(got)
	if welcome.Steering != "x" || welcome.Files[0].Name != "lock" || len(got) != len(files) {
		t.Errorf("got %v with %d descriptors", &welcome, len(got))
	}
	for i := range got {
		if inode(t, got[i]) != inode(t, files[i]) {
			t.Fatalf("descriptor %d is another one's", i)
		}
		if flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(got[i]), syscall.F_GETFD, 0); errno != 0 || flags&syscall.FD_CLOEXEC == 0 {
			t.Fatalf("descriptor %d lives on in programs that this one starts (%v)", i, errno)
		}
	}
	var ask Ask
	if more, err := c.Receive(patience, &ask); err != nil || ask.Step != Give || len(more) != 0 {
		t.Errorf("then %v with %v (%v)", &ask, more, err)
	}
	for range 2 {
		if err := <-sent; err != nil {
			t.Error(err)
		}
	}
}

func inode(t *testing.T, fd int) uint64 {
	t.Helper()
	var s syscall.Stat_t
	if err := syscall.Fstat(fd, &s); err != nil {
		t.Fatal(err)
	}
	return s.Ino
}

// TestStreamsThatEndEarly: wherever a stream ends, there is an error, and no descriptor is left.
func TestStreamsThatEndEarly(t *testing.T) {
	for _, stream := range []string{
		"", "\x00", "\x00\x00\x00\x04\x00\x00\x00\x00", "\x00\x00\x00\x04\x00\x00\x00\x00\xa1\x01", "\x00\x00\x00\x03\x00\x00\x00\x01\xa1\x01\x01",
		"\x00\x00\x00\x03\x00\x00\x00\x01\xa1\x01\x01\x00", "\xff\xff\xff\xff\x00\x00\x00\x00", "\x00\x00\x00\x00\xff\xff\xff\xff", "\x00\x00\x00\x01\x00\x00\x00\x00\xff",
	} {
		a, b := pair(t)
		if _, err := a.Write([]byte(stream)); err != nil {
			t.Fatal(err)
		}
		a.Close()
		if files, err := NewConn(b).Receive(patience, &Ask{}); err == nil || len(files) > 0 {
			t.Errorf("%q: received with %v, %v", stream, files, err)
		}
	}
}

// TestLateOrDecided: of a message that is sent while its receiver stops to wait, both sides know whether it came.
func TestLateOrDecided(t *testing.T) {
	var came, late int
	for i := range 2000 {
		a, b := pair(t)
		var sent error
		var got bool
		var both sync.WaitGroup
		both.Go(func() {
			time.Sleep(time.Duration(i%20) * time.Microsecond)
			sent = NewConn(a).Send(patience, &Ask{Step: Confirm})
		})
		both.Go(func() {
			time.Sleep(10 * time.Microsecond)
			got = NewConn(b).Decided(&Ask{})
		})
		both.Wait()
		if (sent == nil) != got {
			t.Fatalf("sent: %v, received: %v", sent, got)
		}
		if sent != nil && !errors.Is(sent, syscall.EPIPE) {
			t.Errorf("who is late is told %v", sent)
		}
		if got {
			came++
		} else {
			late++
		}
		a.Close()
		b.Close()
	}
	t.Logf("%d came, %d were late", came, late)
}
