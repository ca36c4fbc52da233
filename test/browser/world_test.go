// Package browser looks at the dashboard with a real browser, Chromium, while a
// real kproxy serves real packets in a lab.
package browser

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/test/program"
	"kproxy.dev/kproxy/web"
)

// The kproxy under test, and where what is worth keeping goes.
var binary, artifacts string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run() // every test says why it is skipped
	}
	return program.Run(prepare, func() int {
		defer chromium.stop()
		defer shared.stop()
		return m.Run()
	})
}

// prepare makes $KPROXY_ARTIFACTS, or a folder that stays for people to look at.
func prepare(kproxy, _ string) (err error) {
	binary = kproxy
	if artifacts = os.Getenv("KPROXY_ARTIFACTS"); artifacts == "" {
		if artifacts, err = os.MkdirTemp("", "kproxy-screens-"); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(artifacts, 0o755); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(artifacts, "figures.txt")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// worlds numbers the labs of this process, so that their namespaces differ.
var worlds atomic.Int32

// world is a lab with kproxy on its node, and the dashboard's address.
type world struct {
	net       *lab.Network
	dir       string
	manifests string
	proxy     *lab.Process
	client    *web.Client
	relay     net.Listener
}

// newWorld builds a lab; kproxy doesn't run yet.
func newWorld(ctx context.Context, backends int) (*world, error) {
	cfg := lab.DefaultConfig()
	cfg.Prefix = fmt.Sprintf("kpb-%d-%d", os.Getpid(), worlds.Add(1))
	cfg.Backends = backends
	dir, err := os.MkdirTemp("", "kproxy-browser-")
	if err != nil {
		return nil, err
	}
	w := &world{net: lab.New(cfg), dir: dir, manifests: filepath.Join(dir, "manifests")}
	if err := errors.Join(os.Mkdir(w.manifests, 0o755), w.net.Up(ctx)); err != nil {
		return nil, errors.Join(err, w.stop())
	}
	if w.relay, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, errors.Join(err, w.stop())
	}
	go w.forward()
	return w, nil
}

// start runs kproxy and waits until it is alive. Its dashboard is where it is by
// default, at a loopback address of the node.
func (w *world) start(ctx context.Context, args ...string) error {
	socket := filepath.Join(w.dir, "kproxy.sock")
	w.client = web.NewClient(socket)
	w.proxy = &lab.Process{
		Namespace: w.net.Node, Path: binary,
		Args: append([]string{
			"run", "--manifests", w.manifests, "--socket", socket, "--state-dir", filepath.Join(w.dir, "state"),
			"--hostname-override", "node", "--drain-timeout", "1s",
		}, args...),
	}
	return w.again(ctx)
}

// again starts kproxy as it was started before.
func (w *world) again(ctx context.Context) error {
	if err := w.proxy.Start(); err != nil {
		return err
	}
	return w.proxy.WaitReady(ctx, func() error {
		st, err := w.client.Status(ctx)
		if err == nil && !st.Alive {
			err = errors.New("kproxy isn't alive yet")
		}
		return err
	})
}

// url is the dashboard's address for the browser, under a name that leads to
// this host's loopback interface.
func (w *world) url(host string) string {
	_, port, _ := net.SplitHostPort(w.relay.Addr().String())
	return "http://" + net.JoinHostPort(host, port) + "/"
}

// forward does what `kubectl port-forward` or `ssh -L` do: it leads connections from
// this host's loopback interface to the node's.
func (w *world) forward() {
	for {
		c, err := w.relay.Accept()
		if err != nil {
			return // stop closed it
		}
		go func() {
			defer c.Close()
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			up, err := w.net.Node.Dial(ctx, "tcp", "127.0.0.1:10249")
			if err != nil {
				return
			}
			defer up.Close()
			go func() {
				_, _ = io.Copy(up, c)
				_ = up.(*net.TCPConn).CloseWrite()
			}()
			_, _ = io.Copy(c, up)
		}()
	}
}

// stop takes all of it down, also when it is half up.
func (w *world) stop() error {
	var err error
	if w.relay != nil {
		err = w.relay.Close()
	}
	if w.proxy != nil && w.proxy.Running() {
		err = cmp.Or(err, w.proxy.Kill())
	}
	return errors.Join(err, w.net.Down(), os.RemoveAll(w.dir))
}
