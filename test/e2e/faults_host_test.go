package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// runArgs returns the arguments of a `kproxy run` that has all it needs, and more.
func (w *world) runArgs(more ...string) []string {
	return append([]string{"run", "--mode", string(mode), "--manifests", w.manifests, "--socket", w.socket(), "--state-dir", filepath.Join(w.dir, "state")}, more...)
}

// TestWrongUse: what can be mended on the command line ends with status 2,
// says which flag, and every problem at once.
func TestWrongUse(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args  []string
		wants []string
	}{
		{[]string{"run", "--nosuch"}, []string{"nosuch", "kproxy run --help"}},
		{[]string{"run", "--mode", "sideways", "--manifests", dir}, []string{"--mode", "sideways", "userspace", "iptables"}},
		{[]string{"run"}, []string{"--manifests"}},
		{[]string{"run", "--mode", "sideways", "--alive-timeout", "0s"}, []string{"--mode", "--manifests", "--alive-timeout"}},
		{[]string{"run", "--manifests", dir, "--offload-after", "soon"}, []string{"offload-after", "soon"}},
		{[]string{"run", "--manifests", dir, "web"}, []string{"web"}},
		{[]string{"run", "--manifests", dir, "--kubeconfig", "/nosuch"}, []string{"--kubeconfig"}},
		{[]string{"serve"}, []string{"serve", "kproxy --help"}},
		{[]string{"lab", "sideways"}, []string{"sideways"}},
	} {
		finish(t, nil, command(t, c.args...)).wants(t, 2, c.wants...)
	}
}

// TestNobodyRuns: commands that ask a running kproxy say that there is none,
// and how to start it.
func TestNobodyRuns(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "kproxy.sock")
	for _, args := range [][]string{{"status"}, {"connections"}, {"pin", "default/web", "auto"}} {
		args = append([]string{args[0], "--socket", socket}, args[1:]...)
		finish(t, nil, command(t, args...)).wants(t, 1, "isn't running", socket, "kproxy run")
	}
	dead, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err == nil {
		err = syscall.Bind(dead, &syscall.SockaddrUnix{Name: socket}) // and nothing listens
	}
	if err != nil {
		t.Fatal(err)
	}
	syscall.Close(dead)
	finish(t, nil, command(t, "status", "--socket", socket)).wants(t, 1, "has died", socket)
}

// TestWhatTheHostLacks: without root or without iptables, kproxy ends with
// status 3 and says how to get it.
func TestWhatTheHostLacks(t *testing.T) {
	w := newWorld(t)
	w.must(newManifest("web", 10, w.net.Backends...).Write(w.manifests))
	t.Run("root", func(t *testing.T) {
		public := publicDir(t)
		w.must(os.Chmod(public, 0o777))
		m := newManifest("web", 10, w.net.Backends...)
		write(t, filepath.Join(public, "web.yaml"), m.YAML())
		// With and without a place for its socket: which is missed first differs.
		for _, socket := range []string{filepath.Join(public, "kproxy.sock"), "/run/kproxy-e2e-nobody/kproxy.sock"} {
			cmd := asNobody(t, command(t, "run", "--manifests", public, "--socket", socket, "--state-dir", public))
			finish(t, w.net.Node, cmd).wants(t, 3, "root")
		}
		finish(t, w.net.Node, asNobody(t, command(t, "cleanup", "--state-dir", public))).wants(t, 3, "root")
		finish(t, w.net.Node, asNobody(t, command(t, "lab", "demo"))).wants(t, 3, "root")
		diff := finish(t, w.net.Node, asNobody(t, command(t, "render", "--diff", "--mode", string(kernelPlane), "--manifests", public)))
		if diff.wants(t, 3, "root"); strings.Contains(diff.stderr, "get ") {
			t.Errorf("it says what to get, which can't be known without the permission to look:\n%s", diff.stderr)
		}
	})
	t.Run("iptables", func(t *testing.T) {
		needs := mode
		if kernelPlane == plan.NFTables { // which needs no program
			needs = plan.ModeIPTables
		}
		cmd := command(t, w.runArgs("--mode", string(needs))...)
		cmd.Env = []string{"PATH=/nonexistent"}
		finish(t, w.net.Node, cmd).wants(t, 3, "iptables", "install", "package")
	})
	if !hasIPVS {
		t.Run("IPVS", func(t *testing.T) {
			finish(t, w.net.Node, command(t, w.runArgs("--mode", "ipvs")...)).wants(t, 3, "IPVS", "CONFIG_IP_VS")
		})
	}
	if rules := w.rules() + w.tables(); strings.Contains(rules, "KPROXY") || strings.Contains(rules, "kproxy") {
		t.Errorf("a kproxy that couldn't start has left something behind:\n%s", rules)
	}
}

// TestPortInUse: a port that somebody else has ends kproxy with status 3, and
// says which flag changes it.
func TestPortInUse(t *testing.T) {
	w := newWorld(t)
	w.must(newManifest("web", 10, w.net.Backends...).Write(w.manifests))
	for _, c := range []struct{ network, address, flag string }{
		{"tcp", "127.0.0.1:10249", "--metrics-bind-address"},
		{"tcp", "0.0.0.0:10256", "--healthz-bind-address"},
		{"tcp", ":10244", "--listen-tcp-port"},
		{"udp", ":10244", "--listen-udp-port"},
	} {
		t.Run(c.flag, func(t *testing.T) {
			var taken interface{ Close() error }
			var err error
			if c.network == "tcp" {
				taken, err = w.net.Node.Listen(w.ctx, c.network, c.address)
			} else {
				taken, err = w.net.Node.ListenPacket(w.ctx, c.network, c.address)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer taken.Close()
			port := c.address[strings.LastIndex(c.address, ":"):]
			finish(t, w.net.Node, command(t, w.runArgs()...)).wants(t, 3, "in use", c.flag, port)
		})
	}
}

// TestSecondKproxy: of two on one node, the second ends with status 1 and says
// so where it has a socket of its own, and so can't take over; the first goes on.
func TestSecondKproxy(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	own := w.runArgs("--socket", filepath.Join(w.dir, "second.sock"), "--metrics-bind-address", "127.0.0.1:11249",
		"--healthz-bind-address", "127.0.0.1:11256", "--listen-tcp-port", "0", "--listen-udp-port", "0")
	finish(t, w.net.Node, command(t, own...)).wants(t, 1, "another kproxy", "already running")
	w.kproxy("cleanup").wants(t, 1, "already running")
	if st, err := w.client.Status(w.ctx); err != nil || !st.Alive {
		t.Errorf("the first kproxy: %v, alive %v; want it to serve on", err, st.Alive)
	}
	if err := w.carries(frontends(m)[0], plan.Userspace); err != nil {
		t.Errorf("the first kproxy doesn't carry a new connection: %v", err)
	}
}

// foreign is what others have on the node; kproxy must leave it alone.
var foreign = []string{
	"iptables -t nat -N OTHERS", "iptables -t nat -A OTHERS -p tcp --dport 81 -j ACCEPT",
	"iptables -t nat -A PREROUTING -s 203.0.113.0/24 -j OTHERS", "iptables -t nat -A POSTROUTING -o nosuch -j MASQUERADE",
	"iptables -A INPUT -p tcp --dport 2222 -m comment --comment others -j ACCEPT", "iptables -A FORWARD -s 203.0.113.7 -j DROP",
	"ip6tables -t mangle -A PREROUTING -s 2001:db8::7 -j MARK --set-xmark 0x10/0x10", "ip6tables -N OTHERS", "ip6tables -A FORWARD -s 2001:db8::7 -j OTHERS",
	"ipset create others hash:ip", "ipset add others 203.0.113.7", "iptables -A INPUT -m set --match-set others src -j DROP",
	"ipset create KPROXYLIKE hash:ip", "ipset add KPROXYLIKE 203.0.113.8",
	"nft add table ip others", "nft add chain ip others kproxy",
	"ip rule add fwmark 0x10/0x10 lookup 77 priority 700", "ip -6 rule add fwmark 0x10/0x10 lookup 77 priority 700",
	"ip route add 203.0.113.0/24 dev lo table 77", "ip route add 203.0.113.0/24 dev lo table 10249",
}

// foreignIPVS is what others have of IPVS, one of it beside kproxy's address.
var foreignIPVS = []string{
	"ipvsadm -A -t 203.0.113.9:80 -s wrr -p 60", "ipvsadm -a -t 203.0.113.9:80 -r 203.0.113.10:80 -m -w 3",
	"ipvsadm -A -t 10.96.0.10:81 -s rr", "ipvsadm -a -t 10.96.0.10:81 -r 10.2.0.2:9000 -m",
	"ipvsadm -A -f 77 -s lc", "ipvsadm -a -f 77 -r 203.0.113.10 -g",
	"ip link add others0 type dummy", "ip addr add 203.0.113.9/32 dev others0",
}

// TestCleanupLeavesWhatIsForeign: in both variants of iptables, cleanup after
// kproxy has run leaves the node as it was before kproxy ever ran.
func TestCleanupLeavesWhatIsForeign(t *testing.T) {
	t.Parallel()
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			w := newWorld(t)
			for _, line := range foreign {
				w.inflict(variant, line)
			}
			if w.plane == plan.IPVS {
				for _, line := range foreignIPVS {
					w.inflict(variant, line)
				}
			}
			before := w.everything()
			w.runThroughAllOfIt(variant)
			now, left := w.everything(), map[plan.DataPlane][]string{
				plan.IPTables: {"KPROXY-SVC-", "KPROXY-USER-6"}, plan.IPVS: {"10.96.0.10:80", "KPROXY-USER-6"}, plan.NFTables: {"table ip kproxy", "10.96.0.10 . tcp . 80", "table ip6 kproxy"},
			}[w.plane]
			for _, what := range append(left, "10249") {
				if !strings.Contains(now, what) {
					t.Fatalf("kproxy left no %s when it stopped, so this test shows nothing:\n%s", what, now)
				}
			}
			w.previewsCleanup()
			w.kproxy("cleanup", "--state-dir", filepath.Join(w.dir, "state")).wants(t, 0, "gone")
			if after := w.everything(); after != before {
				t.Errorf("the node isn't as it was before kproxy ran\nbefore:\n%s\nafter:\n%s", before, after)
			}
			w.kproxy("cleanup", "--dry-run", "--state-dir", filepath.Join(w.dir, "state")).wants(t, 0, "nothing to remove")
			w.kproxy("cleanup").wants(t, 0)
			if after := w.everything(); after != before {
				t.Errorf("a second cleanup changes the node to\n%s", after)
			}
		})
	}
}

// previewsCleanup: a dry run names everything that kproxy made and nothing else, and changes nothing.
func (w *world) previewsCleanup() {
	w.Helper()
	before := w.everything()
	got := w.kproxy("cleanup", "--dry-run", "--state-dir", filepath.Join(w.dir, "state"))
	got.wants(w.T, 0, "ipv4 routing rule 10249 to table 10249", "ipv6 local route ::/0 in table 10249", "ipv4 route to the listener's address", "pins.json")
	if after := w.everything(); after != before {
		w.Errorf("a dry run changed the node\nbefore:\n%s\nafter:\n%s", before, after)
	}
	for _, name := range regexp.MustCompile(`KPROXY-[A-Z0-9-]+`).FindAllString(before, -1) {
		if !strings.Contains(got.stdout, name) {
			w.Errorf("a dry run doesn't name %s", name)
		}
	}
	for _, name := range []string{"OTHERS", "others", "KPROXYLIKE", "203.0.113", "10.96.0.10:81"} {
		if strings.Contains(got.stdout, name) {
			w.Errorf("a dry run names %s, which isn't kproxy's", name)
		}
	}
	if w.plane == plan.NFTables {
		got.wants(w.T, 0, "nftables table ip kproxy\n", "nftables table ip6 kproxy\n")
	}
	if w.plane == plan.IPVS && !strings.Contains(got.stdout, "virtual server tcp 10.96.0.10:80\n") {
		w.Errorf("a dry run names no virtual server:\n%s", got.stdout)
	}
}

// runThroughAllOfIt runs kproxy on every kind of service, once in each mode.
func (w *world) runThroughAllOfIt(variant string) {
	w.Helper()
	m := newManifest("web", 10, w.net.Backends...)
	m.Type = "LoadBalancer"
	m.Ports[0].NodePort, m.Ports[1].NodePort, m.Ports[2].NodePort = 30080, 30080, 30081
	m.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}
	m.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
	m.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("fd00:1::/64")}
	m.Affinity = time.Hour
	w.must(m.Write(w.manifests))
	w.must(newManifest("empty", 20).Write(w.manifests))
	w.start("--mode", "userspace")
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.stop()
	w.proxy.Args = append(w.proxy.Args, "--mode", string(mode))
	w.startAgain()
	if kernelPlane == plan.NFTables {
		w.capability("nftables")
	} else if c := w.capability("iptables"); !strings.Contains(c.Reason, variant) {
		w.Fatalf("it works with %q, want the variant that holds the node's rules, %s", c.Reason, variant)
	}
	for _, port := range []string{"line", "datagram"} {
		w.pin("web", port, service.PreferKernel)
	}
	for _, target := range frontends(m) {
		w.ask(w.net.Client, "tcp", target)
		w.ask(w.net.Client, "udp", target)
	}
	w.stop()
}

// capability returns what kproxy says about this host.
func (w *world) capability(name string) plan.Capability {
	w.Helper()
	st, err := w.client.Status(w.ctx)
	w.must(err)
	for _, c := range st.Capabilities {
		if c.Name == name {
			return c
		}
	}
	w.Fatalf("there is no capability %s in the status", name)
	return plan.Capability{}
}

// everything returns all that kproxy could have changed on the node.
func (w *world) everything() string {
	w.Helper()
	return w.rules() + w.sets() + w.tables() + w.routes() + w.virtuals()
}

// tables lists the tables of nftables that iptables doesn't list, without counters and
// without elements that come and go by themselves.
func (w *world) tables() string {
	w.Helper()
	var lines []string
	there, _ := w.net.Node.Output(w.ctx, "nft", "list", "tables") // none without the program
	for _, table := range []string{"ip kproxy", "ip6 kproxy", "ip others"} {
		if !strings.Contains(string(there), "table "+table+"\n") {
			continue
		}
		out, err := w.net.Node.Output(w.ctx, "nft", "-s", "list", "table "+table)
		if err != nil {
			continue // it has gone meanwhile
		}
		for _, line := range strings.FieldsFunc(expiring.ReplaceAllString(string(out), ""), func(r rune) bool { return r == '\n' || r == ',' }) {
			if line = strings.TrimSpace(strings.NewReplacer("elements = {", "", "}", "").Replace(line)); line != "" {
				lines = append(lines, line)
			}
		}
	}
	return "nftables:\n" + sortedLines(lines)
}

// expiring are elements with a lifetime.
var expiring = regexp.MustCompile(`elements = \{[^}]* timeout [^}]*\}`)

// changing are the parts of iptables-save's output that differ with time.
var changing = regexp.MustCompile(`(?m)^#.*\n| \[\d+:\d+\]$`)

// empty is a table with built-in chains only that accept, which is what a table
// that nobody ever used looks like once somebody has listed it.
var empty = regexp.MustCompile(`(?m)^\*\w+\n(:[A-Z]+ ACCEPT\n)*COMMIT\n`)

// rules lists the rules of every variant and family of iptables, without counters.
func (w *world) rules() string {
	w.Helper()
	var b strings.Builder
	for _, program := range []string{"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save"} {
		b.WriteString(program + ":\n" + empty.ReplaceAllString(changing.ReplaceAllString(w.node(program), ""), ""))
	}
	return b.String()
}

// sets are names and members, without those that come and go by themselves.
func (w *world) sets() string {
	w.Helper()
	var keep []string
	for _, line := range strings.Split(w.node("ipset", "save"), "\n") {
		if strings.HasPrefix(line, "add KPROXY-ALIVE-") || strings.HasPrefix(line, "add ") && strings.Contains(line, " timeout ") {
			continue
		}
		keep = append(keep, initval.ReplaceAllString(line, ""))
	}
	return "ipset:\n" + sortedLines(keep)
}

// initval is the seed of a hash; sizes grow and never shrink.
var initval = regexp.MustCompile(` (initval 0x[0-9a-f]+|hashsize \d+|bucketsize \d+)`)

// routes are the rules and the tables that kproxy or others here use.
func (w *world) routes() string {
	w.Helper()
	out := "routes:\n"
	for _, family := range []string{"-4", "-6"} {
		list := exec.CommandContext(w.ctx, "ip", family, "-force", "-batch", "-")
		list.Stdin = strings.NewReader("rule list\nroute list table 77\nroute list table 10249\n")
		e := finish(w.T, w.net.Node, list) // fails where one of the tables isn't there
		if !strings.Contains(e.stdout, "lookup main") {
			w.Fatalf("list rules of routing: %+v", e)
		}
		out += e.stdout
	}
	return out
}

// settings that decide whether the node forwards.
const (
	forward4 = "net.ipv4.ip_forward"
	forward6 = "net.ipv6.conf.all.forwarding"
)

func (w *world) sysctl(name, value string) {
	w.Helper()
	w.node("sysctl", "-qw", name+"="+value)
}

// everywhere makes an exchange with every address of m, from another host and
// from the node.
func (w *world) everywhere(m lab.Manifest) {
	w.Helper()
	for _, target := range frontends(m) {
		for _, network := range []string{"tcp", "udp"} {
			w.ask(w.net.Client, network, target)
			w.ask(w.net.Node, network, target)
		}
	}
}

// keptBack waits until default/web is in userspace because of a setting.
func (w *world) keptBack(setting string) {
	w.Helper()
	for _, port := range []string{"line", "datagram"} {
		w.eventually(10*time.Second, "web:"+port+" to be in userspace because of "+setting, func() error {
			s := w.service("web", port)
			if s.DataPlane != plan.Userspace || s.State != plan.StateUserspace || !strings.Contains(s.Reason, "forwarding is off on this node (sysctl "+setting+")") {
				return fmt.Errorf("%s, %s: %s", s.DataPlane, s.State, s.Reason)
			}
			if !strings.Contains(s.Degraded, "only clients on this node are served while kproxy is down") {
				return fmt.Errorf("degraded %q", s.Degraded)
			}
			return nil
		})
	}
}

// TestNodeThatDoesNotForward: a node doesn't forward IPv6 unless it is told to.
// A dual-stack service then stays in userspace, where it works, and says why;
// it is offloaded as soon as the node forwards, and recalled when that ends.
func TestNodeThatDoesNotForward(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.sysctl(forward6, "0")
	w.start()
	w.everywhere(m)
	sleep(2 * time.Second) // longer than it has to be steady
	w.keptBack(forward6)
	w.everywhere(m)

	w.sysctl(forward6, "1")
	for _, port := range []string{"line", "datagram"} {
		w.await("web", port, w.plane, plan.StateOffloaded)
	}
	w.everywhere(m)

	for _, setting := range []string{forward6, forward4} {
		w.sysctl(setting, "0")
		w.keptBack(setting)
		w.everywhere(m)
		w.sysctl(setting, "1")
		for _, port := range []string{"line", "datagram"} {
			w.await("web", port, w.plane, plan.StateOffloaded)
		}
	}
}
