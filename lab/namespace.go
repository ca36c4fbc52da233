package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// netnsDir is where `ip netns` looks for names.
const netnsDir = "/run/netns"

// Namespace is a named network namespace. It holds no descriptor: a Namespace
// whose lab is down gives errors, and keeps nothing alive.
type Namespace struct {
	Name string // as `ip netns` knows it, unless it is one of FromFD
	file string // that keeps it; empty for netnsDir's
}

// FromFD is the namespace without a name that a descriptor keeps, as long as that is open.
func FromFD(name string, fd int) *Namespace {
	return &Namespace{Name: name, file: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)}
}

// Path is the file that keeps the namespace.
func (n *Namespace) Path() string { return cmp.Or(n.file, filepath.Join(netnsDir, n.Name)) }

// Do runs f on an operating system thread in the namespace and returns its
// error. The thread is thrown away after, so f may change its namespaces
// further. Goroutines that f starts don't run in the namespace, but sockets
// that f opens stay in it wherever they are used.
func (n *Namespace) Do(f func() error) error {
	return onThrowawayThread(func() error {
		if err := enter(n.Name, n.Path()); err != nil {
			return err
		}
		return f()
	})
}

// enter moves the calling thread into the namespace that a file keeps.
func enter(name, file string) error {
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open namespace %s: %w", name, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter namespace %s: %w", name, err)
	}
	return nil
}

// leave moves the calling thread, which entered a namespace, back into the process's and lets other goroutines have it. A thread
// that can't go back stays locked, so that the runtime destroys it.
func leave() error {
	err := enter("of the process", "/proc/self/ns/net") // the main thread's, which never enters another one
	if err == nil {
		runtime.UnlockOSThread()
	}
	return err
}

// onThrowawayThread runs f on a thread that the runtime destroys after, unless f leaves. The
// process's main thread is never used: the runtime can't destroy it, and
// /proc/self/ns/net would show the foreign namespace from then on.
func onThrowawayThread(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			result <- onThrowawayThread(f) // runs elsewhere: this thread is taken
			return
		}
		err := errors.New("function ended its goroutine") // t.FailNow does
		defer func() { result <- err }()
		err = f()
	}()
	return <-result
}

// Command returns a command that runs in the namespace. nsenter (util-linux,
// essential in Debian) replaces itself by the command, so the process id and
// the signals are the command's own. Unlike `ip netns exec` it leaves /sys alone.
func (n *Namespace) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + n.Path(), "--", name}, args...)...)
}

// Output runs a program in the namespace to its end and returns all that it prints. It starts one program less than
// [Namespace.Command].
func (n *Namespace) Output(ctx context.Context, name string, args ...string) (out []byte, err error) {
	err = n.Do(func() (err error) {
		out, err = exec.CommandContext(ctx, name, args...).CombinedOutput()
		return err
	})
	return out, err
}

// Dial connects from the namespace. address must be numeric: names would be
// resolved in the caller's namespace.
func (n *Namespace) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return n.DialFrom(ctx, nil, network, address)
}

// DialFrom is Dial from a local address; nil lets the kernel choose.
func (n *Namespace) DialFrom(ctx context.Context, local net.Addr, network, address string) (c net.Conn, err error) {
	d := net.Dialer{LocalAddr: local, KeepAlive: -1 * time.Second}
	d.SetMultipathTCP(false)
	inside := true
	d.Control = func(network, _ string, s syscall.RawConn) error {
		// The socket belongs to the namespace by now. Its thread doesn't wait for an answer: a thousand that wait would be as many threads.
		if !inside {
			return errors.New("the first socket couldn't be used, and another one would be in the process's namespace")
		}
		inside = false
		if local == nil {
			if err := ownPort(network, s); err != nil {
				return err
			}
		}
		return leave()
	}
	err = n.Do(func() error {
		if network == "sctp" {
			c, err = dialSCTP(ctx, address)
			return err
		}
		c, err = d.DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// The ports of clients, those that the kernel gives as well (net.ipv4.ip_local_port_range of
// a new namespace), are used in turn.
const (
	firstClientPort = 32768
	clientPorts     = 60999 - firstClientPort + 1
)

// clientPort counts them, from anywhere: other processes may use the same namespace.
var clientPort = func() *atomic.Uint32 {
	var n atomic.Uint32
	n.Store(rand.Uint32N(clientPorts))
	return &n
}()

// ownPort gives a socket a port that no other one of its namespace has, and that none has had
// for long. The kernel would choose one for each destination anew. Where two services share
// an endpoint, IPVS can't tell two connections from one port of a client apart (an answer
// doesn't say by which service it was asked for: ip_vs_conn_out_get in
// net/netfilter/ipvs/ip_vs_conn.c). And a port that a connection had before there was a
// service leads where that led, for as long as conntrack remembers it, and so does one that
// a datagram was sent from.
func ownPort(network string, c syscall.RawConn) error {
	var err error
	controlErr := c.Control(func(fd uintptr) {
		err = eachOwnPort(func(port int) error {
			var a unix.Sockaddr = &unix.SockaddrInet4{Port: port}
			if strings.HasSuffix(network, "6") {
				a = &unix.SockaddrInet6{Port: port}
			}
			return unix.Bind(int(fd), a)
		})
	})
	return errors.Join(controlErr, err)
}

// eachOwnPort has bind try one such port after the other until it finds one that is free.
func eachOwnPort(bind func(port int) error) (err error) {
	for range clientPorts {
		if err = bind(firstClientPort + int(clientPort.Add(1)%clientPorts)); !errors.Is(err, unix.EADDRINUSE) {
			return err
		}
	}
	return err
}

// Listen listens for TCP, or SCTP (network "sctp"), in the namespace.
func (n *Namespace) Listen(ctx context.Context, network, address string) (l net.Listener, err error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false) // plain TCP: what a packet dump shows is what is meant
	err = n.Do(func() error {
		if network == "sctp" {
			l, err = listenSCTP(address)
			return err
		}
		l, err = c.Listen(ctx, network, address)
		return err
	})
	return l, err
}

// ListenPacket listens for UDP in the namespace.
func (n *Namespace) ListenPacket(ctx context.Context, network, address string) (p net.PacketConn, err error) {
	var c net.ListenConfig
	err = n.Do(func() error {
		p, err = c.ListenPacket(ctx, network, address)
		return err
	})
	return p, err
}

// HTTPClient returns a client that connects from the namespace, anew for each
// request, so that none depends on the one before and nothing has to be closed.
// Hosts must be numeric, as with Dial. A timeout of 0 is none.
func (n *Namespace) HTTPClient(timeout time.Duration) *http.Client {
	return &http.Client{Timeout: timeout, Transport: &http.Transport{DisableKeepAlives: true, DialContext: n.Dial}}
}

// Get returns what a client gets from a URL. A status other than 200 is an error.
func Get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: status %s: %s", url, resp.Status, text)
	}
	return text, err
}
