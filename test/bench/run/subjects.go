package main

import (
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
	"kproxy.dev/kproxy/plan"
)

// subject is a program or a way for packets from client to backend.
type subject struct {
	name, about string
	class       report.Class
	tcp, udp    bool
	idle        bool // has its share in the case of idle connections, which cost seconds
	way         way
	named       bool                              // only measured where -subjects names it
	start       func(context.Context, *rig) error // nil for nothing to start
	replace     func(context.Context, *rig) error // has another process of the program go on, as its manual says; nil where it can't
}

// way is the address that the client connects to.
type way int

const (
	toBackend way = iota
	toNode
	toService
)

// ioCopy is a subject with a bound of its own.
const ioCopy = "io.Copy"

// subjects are in the order of the report.
var subjects = []subject{
	{"direct", "no proxy: the node routes", report.Limit, true, true, false, toBackend, false, nil, nil},
	{"offloaded", "kproxy in mode nftables, which has offloaded the service: the kernel rewrites the destination", report.Limit, true, true, false, toService, false, startKProxy(plan.NFTables), nil},
	{"haproxy", "HAProxy, at the node's address", report.Peer, true, false, true, toNode, false, haproxy("haproxy.cfg"), reloadHAProxy},
	{"haproxy-splice", "HAProxy with option splice-auto, at the node's address", report.Peer, true, false, false, toNode, false, haproxy("haproxy-splice.cfg"), nil},
	{"nginx", "nginx stream, at the node's address", report.Peer, true, true, true, toNode, false, startNginx, reloadNginx},
	{ioCopy, "a Go proxy of io.Copy, at the node's address", report.Peer, true, false, true, toNode, false, startOwn("copy"), nil},
	{"engine", "kproxy's userspace data plane alone, at the node's address", report.KProxy, true, true, true, toNode, false, startOwn("engine"), nil},
	{"haproxy-redirect", "HAProxy, reached by a REDIRECT rule as kproxy is", report.Peer, true, false, false, toService, false, redirected(haproxy("haproxy.cfg")), nil},
	{"nginx-redirect", "nginx stream, reached by a REDIRECT rule as kproxy is", report.Peer, false, true, false, toService, false, redirected(startNginx), nil},
	{"kproxy", "kproxy in mode iptables at a service's address, the client's address kept", report.KProxy, true, true, true, toService, false, startKProxy(plan.Userspace, "--mode", "iptables"), takeOver},
	{"kproxy-nftables", "the same in mode nftables", report.KProxy, true, true, false, toService, false, startKProxy(plan.Userspace, "--mode", "nftables"), takeOver},
	{"kproxy-supervised", "kproxy with --supervise", report.KProxy, true, true, false, toService, true, startKProxy(plan.Userspace, "--mode", "iptables", "--supervise"), nil},
}

// carries reports whether a subject can carry a kind of load.
func (s *subject) carries(k load.Kind) bool {
	if k.UDP() {
		return s.udp
	}
	return s.tcp
}

//go:embed haproxy.cfg haproxy-splice.cfg nginx.conf
var configurations embed.FS

// configuration writes a peer's configuration, with the rig's addresses.
func (r *rig) configuration(name string) (string, error) {
	text, err := configurations.ReadFile(name)
	if err != nil {
		return "", fmt.Errorf("read configuration: %w", err)
	}
	n := r.config.descriptors
	out := strings.NewReplacer("NODE", r.node().String(), "SERVER", r.server().String(), "DIR", r.Dir,
		// Two descriptors each, and some for what isn't a connection; pipes have two of their own.
		"CONNECTIONS", strconv.Itoa(n*9/20), "PIPES", strconv.Itoa(n/50), "DESCRIPTORS", strconv.Itoa(n)).Replace(string(text))
	at := filepath.Join(r.Dir, name)
	if err := os.WriteFile(at, []byte(out), 0o644); err != nil {
		return "", fmt.Errorf("write configuration: %w", err)
	}
	return at, nil
}

// startProgram starts the proxy on the node.
func (r *rig) startProgram(program string, args ...string) error {
	path, err := exec.LookPath(program)
	if err != nil {
		return fmt.Errorf("find %s: %w (test/setup.sh bench installs it)", program, err)
	}
	r.Proxy = &lab.Process{Namespace: r.Net.Node, Path: path, Args: args}
	return r.Proxy.Start()
}

func haproxy(configuration string) func(context.Context, *rig) error {
	return func(_ context.Context, r *rig) error {
		file, err := r.configuration(configuration)
		if err != nil {
			return err
		}
		return r.startProgram("haproxy", "-db", "-q", "-f", file)
	}
}

func startNginx(_ context.Context, r *rig) error {
	file, err := r.configuration("nginx.conf")
	if err != nil {
		return err
	}
	return r.startProgram("nginx", "-p", r.Dir, "-e", filepath.Join(r.Dir, "error.log"), "-c", file)
}

// startOwn starts one of the benchmark's own proxies.
func startOwn(name string) func(context.Context, *rig) error {
	return func(ctx context.Context, r *rig) error {
		c := ownConfig{Listen: r.node(), To: r.server()}
		for _, k := range load.Kinds {
			switch {
			case !k.UDP():
				c.TCP = append(c.TCP, k.Port())
			case r.subject.udp:
				c.UDP = append(c.UDP, k.Port())
			}
		}
		arg, err := json.Marshal(c)
		if err != nil {
			return fmt.Errorf("encode configuration: %w", err)
		}
		if err := r.startProgram(r.Command[0], name, string(arg)); err != nil {
			return err
		}
		return r.AwaitReady(ctx, r.Proxy)
	}
}

// redirected redirects a service's address to a proxy, as kproxy's rules do.
func redirected(start func(context.Context, *rig) error) func(context.Context, *rig) error {
	return func(ctx context.Context, r *rig) error {
		r.tracks = true
		for _, protocol := range []string{"tcp", "udp"} {
			out, err := r.Net.Node.Command(ctx, "iptables", "-w", "-t", "nat", "-A", "PREROUTING", "-d", load.ServiceAddress.String(),
				"-p", protocol, "-m", "multiport", "--dports", "9201:9299", "-j", "REDIRECT").CombinedOutput()
			if err != nil {
				return fmt.Errorf("redirect %s: %w: %s", protocol, err, out)
			}
		}
		return start(ctx, r)
	}
}

// startKProxy starts the real program with a service that it keeps in a data plane.
func startKProxy(in plan.DataPlane, further ...string) func(context.Context, *rig) error {
	return func(ctx context.Context, r *rig) error {
		r.tracks, r.plane = true, in
		// The clients have gone when the drain ends.
		return r.StartKProxy(ctx, r.config.kproxy, in, append([]string{"--drain-timeout", "3s"}, further...)...)
	}
}
