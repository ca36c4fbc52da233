package handover

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test starts its own program anew, as the process that is killed.
func TestMain(m *testing.M) {
	if os.Getenv("KPROXY_TEST_KEPT") != "" {
		keepAndServe()
	}
	os.Exit(m.Run())
}

// keepAndServe starts a keeper, then accepts a connection, says the numbers, and answers nothing.
func keepAndServe() {
	pid, err := StartKeeper(3)
	fmt.Println(pid, err)
	l, _ := net.Listen("tcp", "127.0.0.1:0")
	f, _ := l.(*net.TCPListener).File()
	fmt.Println(l.Addr(), f.Fd())
	c, _ := l.Accept()
	g, _ := c.(*net.TCPConn).File()
	fmt.Println(g.Fd())
	time.Sleep(time.Minute)
}

func TestDescriptorsOutliveTheProcess(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	runtime.LockOSThread() // the keeper ends with this thread
	p := exec.Command("/proc/self/exe")
	p.ExtraFiles = []*os.File{theirs}
	p.Env = append(os.Environ(), "KPROXY_TEST_KEPT=1")
	p.Stderr = os.Stderr
	out, err := p.StdoutPipe()
	if err == nil {
		err = p.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	defer p.Process.Kill()
	lines := bufio.NewScanner(out)
	next := func() []string {
		lines.Scan()
		return strings.Fields(lines.Text())
	}
	number := func(text string) int {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	keeper := number(next()[0])
	place := next()
	c, err := net.DialTimeout("tcp", place[0], 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	accepted := number(next()[0])

	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for {
		if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid)); err != nil || strings.Contains(string(state), ") Z ") {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := io.WriteString(c, "sent meanwhile"); err != nil {
		t.Fatal("the connection ended with its process:", err)
	}
	waiting, err := net.DialTimeout("tcp", place[0], 10*time.Second)
	if err != nil {
		t.Fatal("the listener ended with its process:", err)
	}
	defer waiting.Close()

	kept := &Kept{Socket: pair[0], Keeper: keeper}
	takeAmongSignals(t, kept, accepted)
	fds, err := kept.Take(accepted, 1000, accepted)
	if err != nil {
		t.Fatal(err)
	}
	defer CloseFiles(fds)
	if len(fds) != 3 || fds[0] < 0 || fds[1] != -1 || fds[2] < 0 {
		t.Fatalf("took %v, want the connection, nothing, and the connection", fds)
	}
	fd := fds[0]
	kept.Release()
	b := make([]byte, 64)
	n, err := unix.Read(fd, b)
	if got := string(b[:max(n, 0)]); got != "sent meanwhile" || err != nil {
		t.Errorf("read %q, %v of what was sent after the process was killed", got, err)
	}
	waiting.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := waiting.Read(b); err == nil || os.IsTimeout(err) {
		t.Error("a connection that wasn't taken isn't closed when the keeper ends:", err)
	}
	if _, err := unix.Wait4(keeper, nil, 0, nil); err != nil {
		t.Error("the keeper has no end that its parent is told of:", err)
	}
	if fds, err := kept.Take(accepted); err == nil {
		t.Errorf("took %v of a keeper that has ended", fds)
	}
}

// takeAmongSignals takes a descriptor many times, while the Go runtime's signal interrupts system calls.
func takeAmongSignals(t *testing.T, kept *Kept, number int) {
	t.Helper()
	thread, stop, stopped := unix.Gettid(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Tgkill(os.Getpid(), thread, unix.SIGURG)
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	for range 200 {
		fds, err := kept.Take(number)
		CloseFiles(fds)
		if err != nil || len(fds) != 1 || fds[0] < 0 {
			t.Fatalf("took %v, %v among signals", fds, err)
		}
	}
}
