package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/test/program"
)

// rig is what a run stands on.
type rig struct {
	options
	world
	dir                string
	measured           string // kproxy's version
	kubeProxy, version string // its program
	net                *lab.Network
	servers            [sides]*server
	cluster            *cluster // nil without an API server
	source             source
	findings           findings
}

// bench measures everything and writes the report, also of a run that was broken
// off.
func bench(ctx context.Context, o options) error {
	out := report{options: o, began: time.Now()}
	var err error
	for _, services := range o.scales {
		r := &rig{options: o, world: world{services, o.endpoints}}
		if err = r.run(ctx); err != nil {
			err = fmt.Errorf("%d services: %w", services, err)
		}
		out.rigs = append(out.rigs, r)
		if err != nil {
			break
		}
	}
	return errors.Join(err, out.write(context.WithoutCancel(ctx)))
}

// run measures with one number of services.
func (r *rig) run(ctx context.Context) (err error) {
	if r.dir, err = memoryFolder(); err != nil {
		return err
	}
	defer os.RemoveAll(r.dir)
	if err := r.programs(ctx); err != nil {
		return err
	}
	if r.net, err = newNetwork(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.net.Down()) }()
	for side := range sides {
		if r.servers[side], err = serve(ctx, r.net.Backends[side], side); err != nil {
			return err
		}
		defer r.servers[side].listener.Close()
	}
	if err := r.openSource(ctx); err != nil {
		return err
	}
	defer r.closeSource()
	return r.rounds(ctx)
}

// memoryFolder is a folder that costs no disk where the machine has one.
func memoryFolder() (string, error) {
	const shm = "/dev/shm"
	if _, err := os.Stat(shm); err != nil {
		return os.MkdirTemp("", "kproxy-programming-")
	}
	return os.MkdirTemp(shm, "kproxy-programming-")
}

// programs finds or builds who is measured.
func (r *rig) programs(ctx context.Context) (err error) {
	top, err := root()
	if err != nil {
		return err
	}
	if r.kproxy == "" {
		if r.kproxy, err = program.Kproxy(r.dir); err != nil {
			return err
		}
	}
	if r.measured, err = versionOf(ctx, r.kproxy, top); err != nil {
		return err
	}
	if slices.ContainsFunc(r.subjects, func(name string) bool { s, _ := subjectOf(name); return s.kind == kubeProxy }) {
		if r.kubeProxy, r.version, err = kubeProxyProgram(ctx, top); err != nil {
			return err
		}
	}
	// Who calls iptables is to meet one variant, whatever this host's is.
	for _, variant := range []string{"nft", "legacy"} {
		dir := r.variantFolder(variant)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		for _, name := range []string{"iptables", "ip6tables"} {
			for _, suffix := range []string{"", "-save", "-restore"} {
				path, err := exec.LookPath(name + "-" + variant + suffix)
				if err != nil {
					return fmt.Errorf("find both variants of iptables: %w", err)
				}
				if err := os.Symlink(path, filepath.Join(dir, name+suffix)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (r *rig) variantFolder(variant string) string {
	return filepath.Join(r.dir, "iptables-"+variant)
}

// openSource makes what services come from, with all of them in it.
func (r *rig) openSource(ctx context.Context) error {
	if r.options.source == sourceManifests {
		dir := filepath.Join(r.dir, "manifests")
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		s, err := newManifestSource(dir, r.world)
		r.source = s
		return err
	}
	top, err := root()
	if err != nil {
		return err
	}
	programs, err := controlPlanePrograms(ctx, top)
	if err != nil {
		return err
	}
	dir, err := cache()
	if err != nil {
		return err
	}
	kept := filepath.Join(dir, fmt.Sprintf("objects-%s-%s-%dx%d", objectsVersion, filepath.Base(programs), r.world.services, r.world.endpoints))
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	r.cluster = newCluster(programs, r.dir, r.net.Backends[controlPlane])
	found, err := loadData(ctx, r.cluster, kept)
	if err == nil {
		err = r.cluster.start(ctx)
	}
	if err == nil && !found {
		began := time.Now()
		r.say("writing %d services to the API server, which is done once", r.world.services)
		if err = r.cluster.populate(ctx, r.world, r.net.Config.NodeAddresses()); err == nil {
			r.say("took %s", time.Since(began).Round(time.Second))
			err = keepData(ctx, r.cluster, kept)
		}
	}
	if err != nil {
		return fmt.Errorf("start the control plane: %w", err)
	}
	r.source, err = newAPISource(context.WithoutCancel(ctx), r.cluster, r.world)
	return err
}

func (r *rig) closeSource() {
	if r.source != nil {
		r.source.close()
	}
	if r.cluster != nil {
		if err := r.cluster.stop(); err != nil {
			r.say("stop the control plane: %v", err)
		}
	}
}

func (r *rig) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format("15:04:05")}, args...)...)
}

// rounds has subjects take turns, every other time in reverse.
func (r *rig) rounds(ctx context.Context) error {
	for round := range r.options.rounds {
		r.findings.round = round
		order := slices.Clone(r.subjects)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, name := range order {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s, _ := subjectOf(name)
			if s.kind == kubeProxy && r.cluster == nil {
				continue // it reads an API only
			}
			if s.left(r.world.services) != "" && !r.slow {
				continue // the report says so
			}
			r.say("%d services, round %d of %d: %s", r.world.services, round+1, r.options.rounds, s.name)
			if err := r.watchedTurn(ctx, s); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
	}
	return nil
}

// watchedTurn is a turn, and what else the machine did meanwhile.
func (r *rig) watchedTurn(ctx context.Context, s subject) error {
	var running []*lab.Process
	if r.cluster != nil {
		running = append(running, r.cluster.etcd, r.cluster.api)
	}
	was, err := readUse(running...)
	if err != nil {
		return err
	}
	if err := r.turn(ctx, s); err != nil {
		return err
	}
	is, err := readUse(running...)
	if err != nil {
		return err
	}
	steal, others := is.since(was)
	r.findings.steal, r.findings.others = append(r.findings.steal, steal), append(r.findings.others, others)
	return nil
}

// start starts a proxy; whoever stops it is to call the returned function.
func (r *rig) start(s subject) (*proxy, func() error, error) {
	p := &proxy{subject: s}
	var err error
	if p.dir, err = os.MkdirTemp(r.dir, "state-"); err != nil {
		return nil, nil, err
	}
	if p.log, err = newLogWatch(s.written(), r.logs, s.name); err != nil {
		return nil, nil, err
	}
	p.process = &lab.Process{
		Namespace: r.net.Node, Output: p.log, Path: r.kubeProxy, Args: r.source.args(s),
		Env: []string{"PATH=" + r.variantFolder(s.variant) + ":" + os.Getenv("PATH")},
	}
	if s.kind == kproxy {
		p.process.Path = r.kproxy
		p.process.Args = append(append([]string{"run", "--mode", s.mode, "-v", "debug", "--socket", p.socket(), "--state-dir", p.dir}, p.process.Args...), r.kproxyFlags(s)...)
	} else {
		p.process.Args = append(p.process.Args, "--proxy-mode", s.mode, "--vmodule", "proxier=2", "--conntrack-max-per-core", "0")
	}
	p.process.Args = append(p.process.Args, "--hostname-override", nodeName, "--cluster-cidr", podCIDR)
	stop := func() error { return errors.Join(p.process.Kill(), p.log.close(), r.clean(p)) }
	return p, stop, p.process.Start()
}

func (r *rig) kproxyFlags(s subject) []string {
	var out []string
	if s.kernel() {
		out = slices.Clone(everyService)
	}
	if r.profiles != "" {
		out = append(out, "--profiling")
	}
	return append(out, r.kproxyArgs...)
}

// clean removes what a proxy has left on the node, and waits until the kernel has
// thrown it away, which it does later for nftables (nf_tables_trans_destroy_work).
func (r *rig) clean(p *proxy) error {
	ctx, cancel := context.WithTimeout(context.Background(), r.deadline)
	defer cancel()
	var script strings.Builder
	script.WriteString("nft flush ruleset\n")
	for _, program := range []string{"iptables-legacy", "ip6tables-legacy"} {
		for _, table := range []string{"nat", "filter", "mangle", "raw"} {
			fmt.Fprintf(&script, "printf '*%s\\nCOMMIT\\n' | %s-restore\n", table, program)
		}
	}
	err := errors.Join(
		command(ctx, r.net.Node, "sh", "-ec", script.String()),
		r.net.Node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }),
	)
	if p.kind == kproxy {
		err = errors.Join(err, command(ctx, r.net.Node, r.kproxy, "cleanup", "--state-dir", p.dir))
	}
	if r.quick {
		return err
	}
	return errors.Join(err, idleMachine(ctx))
}

// endpointPattern matches an endpoint's address in rules, as each kind of them
// has it.
var endpointPattern = regexp.MustCompile(`(10\.1[2-9][0-9]\.[0-9]+\.[0-9]+)(?::| \. )` + strconv.Itoa(int(serverPort)))

// ruleCount counts the endpoints that rules in the kernel lead to.
func (r *rig) ruleCount(ctx context.Context, s subject) (int, error) {
	args := []string{"iptables-" + s.variant + "-save", "-t", "nat"}
	if s.mode == "nftables" {
		args = []string{"nft", "list", "table", "ip", "kube-proxy"}
	}
	out, err := r.net.Node.Command(ctx, args[0], args[1:]...).Output()
	if err != nil {
		return 0, fmt.Errorf("count endpoints in rules: %w", err)
	}
	seen := map[string]bool{}
	for _, m := range endpointPattern.FindAllSubmatch(out, -1) {
		seen[string(m[1])] = true
	}
	return len(seen), nil
}

// endpointCount is how many endpoints there are.
func (w world) endpointCount() int { return w.services*w.endpoints - movables*(w.endpoints-1) }

// direct is where a client reaches a backend without any service.
func (r *rig) direct() netip.AddrPort { return r.net.Backends[0].Address(false, serverPort) }
