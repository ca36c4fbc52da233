package programming

import (
	"context"
	"encoding/binary"
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

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
)

// rig holds what a run with one number of services needs, and what it has found.
type rig struct {
	Options
	world
	dir                string
	kubeProxy, version string // its program
	net                *lab.Network
	loads              load.Rig // in net
	servers            [sides]*server
	cluster            *cluster
	round              int
	found              []report.Case // one for each of figures
	warnings           []string
	failed             []error
	steal, others      []float64 // of each turn, between 0 and 1
}

// run measures with one number of services.
func (r *rig) run(ctx context.Context) (err error) {
	if r.dir, err = os.MkdirTemp("/dev/shm", "kproxy-programming-"); err != nil { // which costs no disk
		return err
	}
	defer os.RemoveAll(r.dir)
	if err := r.programs(ctx); err != nil {
		return err
	}
	if err := r.network(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.net.Down()) }()
	for side := range sides {
		if r.servers[side], err = serve(ctx, r.net.Backends[side], side); err != nil {
			return err
		}
		defer r.servers[side].listener.Close()
	}
	if r.loads = (load.Rig{Net: r.net, Command: []string{r.Loads}}); r.wants(caseForward) {
		defer r.loads.StopServers()
		if err := r.loads.Serve(ctx, r.net.Backends[0]); err != nil {
			return err
		}
	}
	programs, err := built(ctx)
	if err != nil {
		return err
	}
	if err := r.startCluster(ctx, programs); err != nil {
		return fmt.Errorf("start the control plane: %w", err)
	}
	defer func() { err = errors.Join(err, r.cluster.stop()) }()
	return r.rounds(ctx)
}

// The backends of the lab: two that serve, and one whose namespace is the
// control plane's.
const (
	sides        = 2
	controlPlane = 2
)

// network builds the lab and has its first two backends own the endpoints'
// networks (AnyIP: a local route makes all of a network the host's own addresses).
func (r *rig) network(ctx context.Context) error {
	c := lab.DefaultConfig()
	c.Prefix, c.Backends, c.IPv6 = fmt.Sprintf("kpp-%d", os.Getpid()), sides+1, false
	r.net = lab.New(c)
	if err := r.net.Up(ctx); err != nil {
		return err
	}
	r.net.Backends[controlPlane].Stop() // it serves nothing but the API
	for side, network := range endpointNetworks {
		b := r.net.Backends[side]
		err := command(ctx, r.net.Node, "ip", "route", "add", network.String(), "via", b.Addresses[0].String(), "dev", b.Name, "onlink")
		if err == nil {
			err = command(ctx, b.Namespace, "ip", "route", "add", "local", network.String(), "dev", "lo")
		}
		if err != nil {
			return fmt.Errorf("give backend %s its network: %w (%w)", b.Name, err, r.net.Down())
		}
	}
	return nil
}

// command runs a command in a namespace.
func command(ctx context.Context, ns *lab.Namespace, name string, args ...string) error {
	if out, err := ns.Command(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// programs finds or builds what is measured.
func (r *rig) programs(ctx context.Context) error {
	if slices.ContainsFunc(r.Subjects, func(name string) bool { return subjectOf(name).kind == kubeProxy }) {
		var args []string // optimised, which takes minutes to build, where it is measured
		if !r.Quick {
			args = []string{"kube-proxy"}
		}
		folder, err := built(ctx, args...)
		if err != nil {
			return err
		}
		r.kubeProxy = filepath.Join(folder, "kube-proxy")
		r.version, _, _ = strings.Cut(filepath.Base(folder), "-")
	}
	// Proxies find one variant of iptables, whatever this host's default is.
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

// startCluster starts the API server with all objects in it.
func (r *rig) startCluster(ctx context.Context, programs string) error {
	kept := filepath.Join(filepath.Dir(programs), fmt.Sprintf("objects-%s-%s-%dx%d", objectsVersion, filepath.Base(programs), r.world.services, r.world.endpoints))
	starting, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	c := newCluster(programs, r.dir, r.net.Backends[controlPlane], r.world)
	found, err := c.loadData(starting, kept)
	if err == nil {
		err = c.start(starting)
	}
	if err == nil && !found {
		r.say("writing %d services to the API server, which is done once", r.world.services)
		if err = c.populate(starting, r.net.Config.NodeAddresses(), r.net.Backends[0].Addresses[0]); err == nil {
			err = c.keepData(starting, kept)
		}
	}
	if err == nil {
		err = c.watch(context.WithoutCancel(ctx))
	}
	if err != nil {
		return errors.Join(err, c.stop())
	}
	r.cluster = c
	return nil
}

func (r *rig) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format("15:04:05")}, args...)...)
}

// rounds has subjects take turns, every other time in reverse.
func (r *rig) rounds(ctx context.Context) error {
	for r.round = range r.Rounds {
		order := slices.Clone(r.Subjects)
		if r.round%2 == 1 {
			slices.Reverse(order)
		}
		for _, name := range order {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s := subjectOf(name)
			if s.most > 0 && r.world.services > s.most && !r.Slow {
				continue // the report says so
			}
			r.say("%d services, round %d of %d: %s", r.world.services, r.round+1, r.Rounds, s.Name)
			if err := r.watchedTurn(ctx, s); err != nil {
				return fmt.Errorf("%s: %w", s.Name, err)
			}
		}
	}
	return nil
}

// watchedTurn is a turn, and what else the machine did meanwhile.
func (r *rig) watchedTurn(ctx context.Context, s subject) error {
	was, own, err := r.use()
	if err != nil {
		return err
	}
	if err := r.turn(ctx, s); err != nil {
		return err
	}
	is, ownNow, err := r.use()
	if err != nil {
		return err
	}
	busy, steal := is.Machine-was.Machine, is.Steal-was.Steal
	if all := busy + steal + is.Idle - was.Idle; all > 0 {
		r.steal, r.others = append(r.steal, steal/all), append(r.others, max(0, busy-(ownNow-own))/all)
	}
	return nil
}

// use reads what the processors have done so far, and how many seconds of it they did for
// this process, its children that have ended, with theirs, and the control plane.
func (r *rig) use() (machine load.CPU, own float64, err error) {
	if machine, err = load.ReadMachine(); err != nil {
		return machine, 0, err
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if err := unix.Getrusage(who, &u); err != nil {
			return machine, 0, fmt.Errorf("read own processor time: %w", err)
		}
		own += time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
	}
	for _, p := range []*lab.Process{r.cluster.Etcd, r.cluster.API} {
		t, err := load.ProcessTime(p.PID())
		if err != nil {
			return machine, 0, err
		}
		own += t
	}
	return machine, own, nil
}

// idleMachine waits until the machine has little to do, but for some seconds at most:
// other programs that keep it busy are in the report.
func idleMachine(ctx context.Context) error {
	const window, enough, most = 250 * time.Millisecond, 0.9, 20
	was, err := load.ReadMachine()
	for range most {
		if err != nil {
			return err
		}
		if err := lab.Sleep(ctx, window); err != nil {
			return err
		}
		var now load.CPU
		now, err = load.ReadMachine()
		if idle, all := now.Idle-was.Idle, now.Idle-was.Idle+now.Machine-was.Machine+now.Steal-was.Steal; idle >= enough*all {
			return err
		}
		was = now
	}
	return err
}

// start starts a proxy; the returned function stops it.
func (r *rig) start(s subject) (*proxy, func() error, error) {
	dir, err := os.MkdirTemp(r.dir, "state-")
	if err != nil {
		return nil, nil, err
	}
	p := &proxy{subject: s, dir: dir, log: &logWatch{mark: []byte(s.written())}}
	p.process = &lab.Process{
		Namespace: r.net.Node, Output: p.log, Path: r.kubeProxy, Args: []string{"--kubeconfig", r.cluster.kubeconfig},
		Env: []string{"PATH=" + r.variantFolder(s.variant) + ":" + os.Getenv("PATH")},
	}
	if s.kind == kproxy {
		p.process.Path = r.KProxy
		p.process.Args = append([]string{"run", "--mode", s.mode, "-v", "debug", "--socket", p.socket(), "--state-dir", p.dir}, p.process.Args...)
		if s.kernel() {
			p.process.Args = append(p.process.Args, everyService...)
		}
	} else {
		p.process.Args = append(p.process.Args, "--proxy-mode", s.mode, "--vmodule", "proxier=2", "--conntrack-max-per-core", "0")
		if r.Quick { // instead of a second before each change
			p.process.Args = append(p.process.Args, "--iptables-min-sync-period", "50ms")
		}
	}
	p.process.Args = append(p.process.Args, "--hostname-override", nodeName, "--cluster-cidr", podCIDR)
	stop := func() error { return errors.Join(p.process.Kill(), r.clean(p)) }
	return p, stop, p.process.Start()
}

// clean removes what a proxy has left on the node, and waits until the kernel has
// thrown it away, which it does later for nftables (nf_tables_trans_destroy_work).
func (r *rig) clean(p *proxy) error {
	ctx, cancel := context.WithTimeout(context.Background(), r.Deadline)
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
		r.net.Node.Do(func() error { return vnetlink.ConntrackTableFlush(vnetlink.ConntrackTable) }),
	)
	if p.kind == kproxy {
		err = errors.Join(err, command(ctx, r.net.Node, r.KProxy, "cleanup", "--state-dir", p.dir))
	}
	if r.Quick {
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
		if s.kind == kproxy { // nft 1.0.6 takes minutes for so many elements
			return r.elementCount()
		}
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

// elementCount counts the endpoints in kproxy's map.
func (r *rig) elementCount() (int, error) {
	seen := map[string]bool{}
	err := r.net.Node.Do(func() error {
		s, err := netlink.Open(unix.NETLINK_NETFILTER, 64<<10)
		if err != nil {
			return err
		}
		defer s.Close()
		return s.Dump(func(b []byte) []byte {
			b = netlink.AppendRequest(b, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP)
			b = netlink.AppendText(netlink.AppendNetfilter(b, unix.NFPROTO_IPV4), unix.NFTA_SET_ELEM_LIST_TABLE, "kproxy")
			return netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_SET, "backends")
		}, func(body []byte) {
			for _, list := range netlink.Attributes(body[netlink.SizeofNetfilter:]) {
				for _, element := range netlink.Attributes(list) {
					for typ, data := range netlink.Attributes(element) {
						_, value, _, _ := netlink.Next(data)
						if typ == unix.NFTA_SET_ELEM_DATA && len(value) > 5 && binary.BigEndian.Uint16(value[4:]) == serverPort { // others are the API server's
							seen[string(value)] = true
						}
					}
				}
			}
		})
	})
	if err != nil {
		return 0, fmt.Errorf("count endpoints in the kernel: %w", err)
	}
	return len(seen), nil
}

// endpointCount returns how many endpoints there are.
func (w world) endpointCount() int { return w.services*w.endpoints - movables*(w.endpoints-1) }

// direct returns where a client reaches a backend without any service.
func (r *rig) direct() netip.AddrPort { return r.net.Backends[0].Address(false, serverPort) }
