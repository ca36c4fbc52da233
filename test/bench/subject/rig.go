package subject

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/test/bench/traffic"
	"kproxy.dev/kproxy/web"
)

// Config says what rigs are made of.
type Config struct {
	Prefix  string // of the namespaces' names
	Program string // the benchmark itself: client, server and its own proxies
	KProxy  string // the program
	// Descriptors is how many file descriptors a process may have.
	Descriptors int
}

// clients is how many addresses the client has, for UDP sessions from ports that
// weren't used before.
const clients = 16

// Rig is a subject, set up.
type Rig struct {
	Subject *Subject
	config  Config
	net     *lab.Network
	dir     string
	server  *lab.Process
	proxy   *lab.Process // nil for none
	client  *web.Client  // of kproxy
	rules   bool         // the node tracks connections
	session int          // of the UDP sessions' ports
	// sessionsEnded is when the last run of UDP sessions did.
	sessionsEnded time.Time
}

// New describes a rig; nothing exists before Up.
func New(c Config, s *Subject) *Rig {
	name := c.Prefix + "-" + strings.ReplaceAll(strings.ToLower(s.Name), ".", "")
	network := lab.DefaultConfig()
	network.Prefix, network.Backends, network.Clients, network.IPv6 = name, 1, clients, false
	return &Rig{Subject: s, config: c, net: lab.New(network), dir: filepath.Join("/run", name)}
}

// Up builds the network and starts server and proxy. When it fails, nothing is left.
func (r *Rig) Up(ctx context.Context) error {
	if err := errors.Join(os.RemoveAll(r.dir), os.MkdirAll(r.dir, 0o755)); err != nil {
		return err
	}
	err := r.up(ctx)
	if err != nil {
		err = errors.Join(fmt.Errorf("set up %s: %w", r.Subject.Name, err), r.Down())
	}
	return err
}

func (r *Rig) up(ctx context.Context) error {
	if err := r.net.Up(ctx); err != nil {
		return err
	}
	for _, ns := range []*lab.Namespace{r.net.Client, r.net.Node, r.backend().Namespace} {
		if err := widenPorts(ns); err != nil {
			return err
		}
	}
	r.server = r.own(r.backend().Namespace, "serve")
	if err := r.server.Start(); err != nil {
		return err
	}
	if err := r.said(ctx, r.server, Ready); err != nil {
		return err
	}
	if r.Subject.start != nil {
		if err := r.Subject.start(ctx, r); err != nil {
			return err
		}
	}
	return r.reach(ctx)
}

// widenPorts has clients and proxies all ports, so that none of them runs out.
func widenPorts(ns *lab.Namespace) error {
	return ns.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("10000 65535"), 0)
	})
}

// Down takes it down, also when it is half up.
func (r *Rig) Down() error {
	errs := []error{r.stopProxy()}
	if r.server != nil {
		errs = append(errs, r.server.Kill())
	}
	return errors.Join(append(errs, r.net.Down(), os.RemoveAll(r.dir))...)
}

// Ready is what the benchmark's own programs print when they serve.
const Ready = "ready"

// environment of the benchmark's own programs: no signal interrupts a thread that
// computes, so that none interrupts a system call (runtime, "asyncpreemptoff").
var environment = []string{"GODEBUG=asyncpreemptoff=1"}

// own describes one of the benchmark's own programs.
func (r *Rig) own(ns *lab.Namespace, args ...string) *lab.Process {
	return &lab.Process{Namespace: ns, Path: r.config.Program, Args: args, Env: environment}
}

// said waits until a program has printed a word.
func (r *Rig) said(ctx context.Context, p *lab.Process, word string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return p.WaitReady(ctx, func() error {
		if strings.Contains(p.Log(), word) {
			return nil
		}
		return fmt.Errorf("it hasn't said %q yet", word)
	})
}

func (r *Rig) backend() *lab.Backend { return r.net.Backends[0] }

// node is the node's address on the client's side.
func (r *Rig) node() netip.Addr { return r.net.Config.NodeAddresses()[0] }

// server's address.
func (r *Rig) serverAddress() netip.Addr { return r.backend().Addresses[0] }

// Target is where a kind of load goes.
func (r *Rig) Target(k traffic.Kind) netip.AddrPort {
	to := r.serverAddress()
	switch r.Subject.way {
	case toNode:
		to = r.node()
	case toService:
		to = ServiceAddress
	}
	return netip.AddrPortFrom(to, k.Port())
}

// reach waits until an exchange goes through.
func (r *Rig) reach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, k := range []traffic.Kind{traffic.Exchange, traffic.Datagram} {
		if !r.Subject.Carries(k) {
			continue
		}
		for {
			err := r.exchange(ctx, k)
			if err == nil {
				break
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
				return fmt.Errorf("reach the server with kind %s: %w", k, err)
			}
		}
	}
	return nil
}

func (r *Rig) exchange(ctx context.Context, k traffic.Kind) error {
	ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond) // a lost SYN is sent again after a second
	defer cancel()
	network := map[bool]string{false: "tcp", true: "udp"}[k.UDP()]
	c, err := r.net.Client.Dial(ctx, network, r.Target(k).String())
	if err != nil {
		return err
	}
	defer c.Close()
	request, answer := bytes.Repeat([]byte("kproxy!!"), 8), make([]byte, 64)
	if err := c.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := c.Write(request); err != nil {
		return err
	}
	if _, err := c.Read(answer); err != nil || !bytes.Equal(request, answer) {
		return errors.Join(err, errors.New("the answer isn't what was sent"))
	}
	return nil
}

// forget has the kernel forget every connection, so that no run meets what an
// earlier one left in the table, which has a bound.
func (r *Rig) forget() error {
	if !r.rules {
		return nil
	}
	return r.net.Node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

// Proxied reports whether there is a proxy.
func (r *Rig) Proxied() bool { return r.proxy != nil }

// Restart ends the proxy and starts it again.
func (r *Rig) Restart(ctx context.Context) error {
	if r.proxy == nil {
		return nil
	}
	if err := errors.Join(r.stopProxy(), r.forget()); err != nil {
		return err
	}
	if err := r.proxy.Start(); err != nil {
		return err
	}
	if r.client != nil {
		if err := r.proxy.WaitReady(ctx, func() error { return r.programmed(ctx) }); err != nil {
			return err
		}
	}
	return r.reach(ctx)
}
