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
		return choiceFlag(&cli.StringFlag{Name: "mode", Value: config.Default().Mode, Usage: "mode of the lab's kproxy: " + strings.Join(config.Modes, ", ")}, config.Modes...)
	}
	return &cli.Command{
		Name:  "lab",
		Usage: "a network of namespaces on this machine, with a real kproxy in it; needs root",
		Subcommands: []*cli.Command{
			{
				Name: "up", Usage: "start the lab and watch it until Ctrl-C",
				Flags: []cli.Flag{
					mode(), slowFlag(),
					&cli.IntFlag{Name: "backends", Value: 3, Usage: "`N` backends"},
					&cli.Float64Flag{Name: "traffic", Value: 20, Usage: "`RATE` of new connections per second; 0 for none"},
				},
				Action: func(c *cli.Context) error { return hostError(labUp(c)) },
			},
			{
				Name: "demo", Usage: "show offload, a dying backend, recall, a killed proxy and its return, in under a minute",
				Flags:  []cli.Flag{mode(), slowFlag()},
				Action: func(c *cli.Context) error { return hostError(labDemo(c)) },
			},
			labLessonCommand(), labCompareCommand(), compareProcessCommand(),
			{
				Name: "down", Usage: "end the lab that is up, and remove what one that was killed has left",
				Action: func(c *cli.Context) error {
					if err := needRoot(); err != nil {
						return err
					}
					return errors.Join(endLab(c.Context), compare.Down(lab.DefaultPrefix))
				},
			},
		},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return noCommand("kproxy lab", c.Command.Subcommands, c.Args().First())
			}
			return cli.ShowSubcommandHelp(c)
		},
	}
}

// labService is the address of the lab's service.
var labService = netip.MustParseAddrPort("10.96.0.10:80")

// labSession is a running lab: the network, the manifests, and kproxy itself
// on the node.
type labSession struct {
	pace      pace
	lock      *os.File
	net       *lab.Network
	manifest  lab.Manifest
	manifests string // directory
	proxy     *lab.Process
	client    *web.Client
}

// pace says how many times slower than usual this machine is.
type pace int

func paceOf(c *cli.Context) pace { return pace(c.Int("slow")) }

// time stretches what a step may take.
func (p pace) time(d time.Duration) time.Duration { return d * time.Duration(p) }

// atMost stretches what is worth watching only if it doesn't take too long.
func (p pace) atMost(d, most time.Duration) time.Duration { return min(p.time(d), most) }

// aliveTimeout is the --alive-timeout of the lab's kproxy.
func (p pace) aliveTimeout() time.Duration { return p.atMost(3*time.Second, 9*time.Second) }

// startLab builds the network and starts this very program as `kproxy run` in
// the node's namespace.
func startLab(ctx context.Context, mode string, cfg lab.Config, slow pace, extra ...string) (_ *labSession, err error) {
	if err := needRoot(); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own executable: %w", err)
	}
	lock, err := lockLab()
	if err != nil {
		return nil, err
	}
	cfg.HostAccess = true
	s := &labSession{pace: slow, lock: lock, net: lab.New(cfg), manifests: filepath.Join(labDir, "manifests")}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop())
		}
	}()
	if err := errors.Join(os.Mkdir(s.manifests, 0o755), s.net.Up(ctx)); err != nil {
		return nil, err
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
	if err := s.manifest.Write(s.manifests); err != nil {
		return nil, err
	}
	return s, s.startProxy(ctx)
}

// needRoot is the error of those who aren't.
func needRoot() error {
	if os.Geteuid() != 0 {
		return &exitError{exitHost, errors.New("the lab makes network namespaces and needs root: run it with sudo")}
	}
	return nil
}

// labConfig is a lab with that many backends.
func labConfig(backends int) lab.Config {
	cfg := lab.DefaultConfig()
	cfg.Backends = backends
	return cfg
}

// slowFlag is the one that paceOf reads.
func slowFlag() cli.Flag {
	return &cli.IntFlag{Name: "slow", Value: 1, EnvVars: []string{"KPROXY_E2E_SLOW"}, Usage: "this machine is `N` times slower than usual, as an emulated one is: everything gets more time"}
}

// checkLabFlags says what of a lab's flags makes no sense, before anything is made.
func checkLabFlags(c *cli.Context) error {
	if slow := c.Int("slow"); slow < 1 || slow > 1000 {
		return usageError("--slow %d: want 1 to 1000", slow)
	}
	return nil
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
	return errors.Join(err, s.net.Down(), unlockLab(s.lock))
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
