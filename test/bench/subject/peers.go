package subject

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
	"kproxy.dev/kproxy/test/bench/proxies"
)

//go:embed haproxy.cfg haproxy-splice.cfg nginx.conf
var configurations embed.FS

// configuration writes a peer's configuration, with the rig's addresses.
func (r *Rig) configuration(name string) (string, error) {
	text, err := configurations.ReadFile(name)
	if err != nil {
		return "", fmt.Errorf("read configuration: %w", err)
	}
	out := strings.NewReplacer("NODE", r.node().String(), "SERVER", r.serverAddress().String(), "DIR", r.dir,
		// Two descriptors each, and some for what isn't a connection; pipes have two of their own.
		"CONNECTIONS", strconv.Itoa(r.config.Descriptors*9/20), "PIPES", strconv.Itoa(r.config.Descriptors/50),
		"DESCRIPTORS", strconv.Itoa(r.config.Descriptors)).Replace(string(text))
	at := filepath.Join(r.dir, name)
	if err := os.WriteFile(at, []byte(out), 0o644); err != nil {
		return "", fmt.Errorf("write configuration: %w", err)
	}
	return at, nil
}

// run starts the proxy on the node.
func (r *Rig) run(program string, args ...string) error {
	path, err := exec.LookPath(program)
	if err != nil {
		return fmt.Errorf("find %s: %w (test/setup.sh bench installs it)", program, err)
	}
	r.proxy = &lab.Process{Namespace: r.net.Node, Path: path, Args: args}
	return r.proxy.Start()
}

func haproxy(configuration string) func(context.Context, *Rig) error {
	return func(_ context.Context, r *Rig) error {
		file, err := r.configuration(configuration)
		if err != nil {
			return err
		}
		return r.run("haproxy", "-db", "-q", "-f", file)
	}
}

func startNginx(_ context.Context, r *Rig) error {
	file, err := r.configuration("nginx.conf")
	if err != nil {
		return err
	}
	return r.run("nginx", "-p", r.dir, "-e", filepath.Join(r.dir, "error.log"), "-c", file)
}

// own starts one of the benchmark's own proxies.
func own(name string) func(context.Context, *Rig) error {
	return func(ctx context.Context, r *Rig) error {
		c := proxies.Config{Listen: r.node(), To: r.serverAddress(), TCP: ports(false)}
		if r.Subject.udp {
			c.UDP = ports(true)
		}
		arg, err := json.Marshal(c)
		if err != nil {
			return fmt.Errorf("encode configuration: %w", err)
		}
		// Without the environment of client and server: as a program that is deployed.
		r.proxy = &lab.Process{Namespace: r.net.Node, Path: r.config.Program, Args: []string{name, string(arg)}}
		if err := r.proxy.Start(); err != nil {
			return err
		}
		return r.said(ctx, r.proxy, Ready)
	}
}
