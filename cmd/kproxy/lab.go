package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

func labCommand() *cli.Command {
	mode := func() cli.Flag {
		return &cli.StringFlag{Name: "mode", Value: config.Default().Mode, Usage: "mode of the lab's kproxy: " + strings.Join(config.Modes, ", ")}
	}
	slow := func() cli.Flag {
		return &cli.IntFlag{Name: "slow", Value: 1, EnvVars: []string{"KPROXY_E2E_SLOW"}, Usage: "this machine is `N` times slower than usual, as an emulated one is: everything gets more time"}
	}
	return &cli.Command{
		Name:  "lab",
		Usage: "a network of namespaces on this machine, with a real kproxy in it; needs root",
		Subcommands: []*cli.Command{
			{
				Name: "up", Usage: "start the lab and watch it until Ctrl-C",
				Flags: []cli.Flag{
					mode(), slow(),
					&cli.IntFlag{Name: "backends", Value: 3, Usage: "`N` backends"},
					&cli.Float64Flag{Name: "traffic", Value: 20, Usage: "`RATE` of new connections per second; 0 for none"},
				},
				Action: func(c *cli.Context) error { return hostError(labUp(c)) },
			},
			{
				Name: "demo", Usage: "show offload, a dying backend, recall, a killed proxy and its return, in under a minute",
				Flags:  []cli.Flag{mode(), slow()},
				Action: func(c *cli.Context) error { return hostError(labDemo(c)) },
			},
			labCompareCommand(), compareLoadCommand(), compareServeCommand(),
			{
				Name: "down", Usage: "remove what an earlier lab left behind",
				Action: func(c *cli.Context) error {
					if err := errors.Join(lab.DownAll(lab.DefaultPrefix), compare.Down(lab.DefaultPrefix)); err != nil {
						return err
					}
					return os.RemoveAll(labDir)
				},
			},
		},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usageError("there is no lab command %q (see kproxy lab --help)", c.Args().First())
			}
			return cli.ShowSubcommandHelp(c)
		},
	}
}

// labDir holds the lab's manifests, for users to edit, its socket and state.
const labDir = "/run/kproxy-lab"

// labService is the address of the lab's service.
var labService = netip.MustParseAddrPort("10.96.0.10:80")

// labSession is a running lab: the network, the manifests, and kproxy itself
// on the node.
type labSession struct {
	pace      pace
	net       *lab.Network
	manifest  lab.Manifest
	manifests string // directory
	proxy     *lab.Process
	client    *web.Client
}

// pace is how many times slower than usual this machine is.
type pace int

func paceOf(c *cli.Context) pace { return pace(max(c.Int("slow"), 1)) }

// time stretches what a step may take.
func (p pace) time(d time.Duration) time.Duration { return d * time.Duration(p) }

// atMost stretches what is worth watching only if it doesn't take too long.
func (p pace) atMost(d, most time.Duration) time.Duration { return min(p.time(d), most) }

// aliveTimeout is the --alive-timeout of the lab's kproxy.
func (p pace) aliveTimeout() time.Duration { return p.atMost(3*time.Second, 9*time.Second) }

// startLab builds the network and starts this very program as `kproxy run` in
// the node's namespace.
func startLab(ctx context.Context, mode string, backends int, slow pace, extra ...string) (*labSession, error) {
	if os.Geteuid() != 0 {
		return nil, &exitError{exitHost, errors.New("the lab makes network namespaces and needs root: run it with sudo")}
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own executable: %w", err)
	}
	cfg := lab.DefaultConfig()
	cfg.Backends, cfg.HostAccess = backends, true
	s := &labSession{pace: slow, net: lab.New(cfg), manifests: filepath.Join(labDir, "manifests")}
	if err := s.net.Up(ctx); err != nil {
		return nil, err
	}
	if err := errors.Join(os.RemoveAll(labDir), os.MkdirAll(s.manifests, 0o755)); err != nil {
		return nil, errors.Join(err, s.net.Down())
	}
	s.manifest = lab.NewManifest("web", 10, s.net.Backends...)
	s.manifest.Type = "NodePort"
	s.manifest.Ports[0].NodePort = 30080
	socket := filepath.Join(labDir, "kproxy.sock")
	s.client = web.NewClient(socket)
	s.proxy = &lab.Process{
		Namespace: s.net.Node, Path: self,
		Args: append([]string{
			"run", "--mode", mode, "--manifests", s.manifests, "--socket", socket,
			"--state-dir", filepath.Join(labDir, "state"), "--hostname-override", "node",
			"--health-interval", slow.atMost(500*time.Millisecond, 2*time.Second).String(),
			"--health-timeout", slow.atMost(400*time.Millisecond, 2*time.Second).String(),
			"--alive-timeout", slow.aliveTimeout().String(),
		}, extra...),
	}
	if host, ok := s.net.HostAddress(); ok {
		s.proxy.Args = append(s.proxy.Args, "--metrics-bind-address", netip.AddrPortFrom(host, 10249).String())
	}
	if err := s.begin(ctx); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

// begin writes the manifests and starts kproxy.
func (s *labSession) begin(ctx context.Context) error {
	if err := s.manifest.Write(s.manifests); err != nil {
		return err
	}
	return s.startProxy(ctx)
}

// startProxy starts kproxy and waits until it serves.
func (s *labSession) startProxy(ctx context.Context) error {
	if err := s.proxy.Start(); err != nil {
		return err
	}
	ready, cancel := context.WithTimeout(ctx, s.pace.time(20*time.Second))
	defer cancel()
	err := s.proxy.WaitReady(ready, func() error {
		st, err := s.client.Status(ready)
		if err == nil && !st.Alive {
			err = errors.New("kproxy isn't alive yet")
		}
		return err
	})
	if err == nil {
		return nil
	}
	err = fmt.Errorf("start kproxy in the lab: %w", err)
	var exit *exec.ExitError
	if !s.proxy.Running() && errors.As(s.proxy.Wait(ctx), &exit) {
		return &exitError{exit.ExitCode(), err} // a mode that this host lacks, for example
	}
	return err
}

// stop takes all of it down, also when it is half up.
func (s *labSession) stop() error {
	var err error
	if s.proxy != nil && s.proxy.Running() {
		err = s.proxy.Kill()
	}
	return errors.Join(err, s.net.Down(), os.RemoveAll(labDir))
}

// service returns the status of the lab's TCP service port.
func (s *labSession) service(ctx context.Context) (plan.ServiceStatus, error) {
	st, err := s.client.Status(ctx)
	if err != nil {
		return plan.ServiceStatus{}, err
	}
	for _, svc := range st.Services {
		if svc.Name == "web" && svc.Port == "line" {
			return svc, nil
		}
	}
	return plan.ServiceStatus{}, errors.New("the lab's service default/web:line isn't in the status")
}
