package docs

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/program"
	"kproxy.dev/kproxy/web"
)

var update = flag.Bool("update", false, "rewrite the blocks of the pages")

// binary is the kproxy that the pages show.
var binary string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	if !program.HasIPVS() { // not run, rather than skipped
		skip := strings.TrimPrefix(flag.Lookup("test.skip").Value.String()+"|^TestIPVS", "|")
		if err := flag.Set("test.skip", skip); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return program.Run(func(kproxy, _ string) error {
		binary = kproxy
		return nil
	}, m.Run)
}

func TestUserspacePage(t *testing.T) { checkPage(t, plan.ModeUserspace, plan.Userspace) }
func TestIPTablesPage(t *testing.T)  { checkPage(t, plan.ModeIPTables, plan.IPTables) }
func TestIPVSPage(t *testing.T)      { checkPage(t, plan.ModeIPVS, plan.IPVS) }

// folder has the pages; basis is the one that explains what every mode has.
const (
	folder = "../../docs"
	basis  = "userspace.md"
)

// checkPage compares the page of a mode with a kproxy that runs in it.
func checkPage(t *testing.T, mode plan.Mode, plane plan.DataPlane) {
	name := filepath.Join(folder, string(mode)+".md")
	page := read(t, name)
	s := startStage(t, mode)
	s.play(plane)
	fresh := map[string]string{}
	for _, b := range blocksOf(page) {
		// What settles a moment later, such as a counter that is about to be read, gets that.
		for try := 0; ; try++ {
			fresh[b.command] = s.run(b.command)
			if masked(b) == masked(block{b.command, fresh[b.command]}) {
				fresh[b.command] = b.output // no change for its own sake
				break
			}
			if try == 3 || *update {
				if !*update {
					t.Errorf("%s: `%s` prints something else now (-page +now; test/docs/update.sh rewrites it):\n%s", name, b.command,
						cmp.Diff(masked(b), masked(block{b.command, fresh[b.command]})))
				}
				break
			}
			time.Sleep(time.Second)
		}
	}
	s.everyChain(name, page)
	s.everyName(name, page)
	if *update {
		s.must(os.WriteFile(name, []byte(replaced(page, fresh)), 0o644))
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// stage is a lab with a kproxy to look at.
type stage struct {
	*testing.T
	ctx    context.Context
	slow   float64
	net    *lab.Network
	client *web.Client
	dir    string
}

// target is the service on every page.
var target = netip.MustParseAddrPort("10.96.0.10:80")

func startStage(t *testing.T, mode plan.Mode) *stage {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	s := &stage{T: t, slow: 1, dir: t.TempDir()}
	if f, err := strconv.ParseFloat(os.Getenv("KPROXY_E2E_SLOW"), 64); err == nil {
		s.slow = max(f, 1)
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.within(3*time.Minute))
	t.Cleanup(cancel)
	s.ctx = ctx
	cfg := lab.DefaultConfig()
	cfg.Prefix, cfg.IPv6 = fmt.Sprintf("kpd-%d-%s", os.Getpid(), mode), false
	s.net = lab.New(cfg)
	s.must(s.net.Up(ctx))
	t.Cleanup(func() { s.must(s.net.Down()) })
	s.startKproxy(mode)
	return s
}

// startKproxy runs it with one service, a command `kproxy` that asks it, and
// what else the pages take for granted.
func (s *stage) startKproxy(mode plan.Mode) {
	s.Helper()
	manifests, socket, commands := filepath.Join(s.dir, "manifests"), filepath.Join(s.dir, "kproxy.sock"), filepath.Join(s.dir, "bin")
	s.must(errors.Join(os.Mkdir(manifests, 0o755), os.Mkdir(commands, 0o755)))
	m := lab.NewManifest("web", 10, s.net.Backends...)
	m.Type, m.Ports = "NodePort", m.Ports[:1]
	m.Ports[0].NodePort = 30080
	s.must(m.Write(manifests))
	self, err := filepath.Abs(binary)
	s.must(err)
	script := fmt.Sprintf("#!/bin/sh\ncommand=$1\nshift\nexec %s \"$command\" --socket %s \"$@\"\n", self, socket)
	s.must(os.WriteFile(filepath.Join(commands, "kproxy"), []byte(script), 0o755))
	proxy := &lab.Process{Namespace: s.net.Node, Path: self, Args: []string{
		"run", "--mode", string(mode), "--manifests", manifests, "--socket", socket, "--state-dir", filepath.Join(s.dir, "state"),
		"--hostname-override", "node", "--offload-after", "1s", "--offload-min-connections", "12",
		"--health-interval", s.within(300 * time.Millisecond).String(), "--health-timeout", s.within(250 * time.Millisecond).String(),
	}}
	s.client = web.NewClient(socket)
	s.Cleanup(func() {
		s.must(proxy.Kill())
		if s.Failed() {
			s.Logf("kproxy's log:\n%s", proxy.Log())
		}
	})
	s.must(proxy.Start())
	s.eventually("every endpoint to be up", func(svc plan.ServiceStatus) bool {
		return !slices.ContainsFunc(svc.Endpoints, func(e plan.EndpointStatus) bool { return e.Health != "up" })
	})
}

// play makes what happened before one looks: three connections that stay and nine
// that don't, and the same once more when the kernel has taken over.
func (s *stage) play(plane plan.DataPlane) {
	s.Helper()
	s.connect()
	if plane != plan.Userspace {
		s.eventually("the offload", func(svc plan.ServiceStatus) bool { return svc.DataPlane == plane && svc.State == plan.StateOffloaded })
		s.connect()
	}
	total := map[bool]uint64{true: 12, false: 24}[plane == plan.Userspace]
	s.eventually("all connections to be counted", func(svc plan.ServiceStatus) bool {
		return svc.Connections.Total >= total && svc.Connections.Active == int64(total/4)
	})
}

func (s *stage) connect() {
	s.Helper()
	for i := range 12 {
		if i >= 3 {
			_, err := s.net.Client.Ask(s.ctx, "tcp", target, "hello")
			s.must(err)
			continue
		}
		h, err := lab.Hold(s.ctx, lab.HoldConfig{From: s.net.Client, Network: "tcp", Target: target, Every: time.Hour, Timeout: s.within(5 * time.Second)})
		s.must(err)
		s.Cleanup(func() { h.Close() })
	}
}

// run returns a block's output.
func (s *stage) run(command string) string {
	s.Helper()
	cmd := s.net.Node.Command(s.ctx, "bash", "-c", command)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(s.dir, "bin")+":"+os.Getenv("PATH")+":/usr/sbin:/sbin", "LC_ALL=C.UTF-8", "COLUMNS=80")
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.Errorf("%s: %v\n%s", command, err, out)
	}
	if strings.Contains(string(out), s.dir) {
		s.Errorf("%s prints the name of a temporary file, usually in an error:\n%s", command, out)
	}
	text := "$ " + command + "\n"
	for line := range strings.Lines(strings.ReplaceAll(string(out), s.net.Config.Prefix, lab.DefaultPrefix)) { // as in the reader's lab
		text += strings.TrimRight(line, " \t\n") + "\n"
	}
	return text
}

// chains matches a chain in what iptables-save prints, after its table.
var chains = regexp.MustCompile(`(?m)^\*(\w+)$|^:(KPROXY-\S+) `)

// everyChain checks that each of kproxy's chains is on the page, or on the basis
// just as it is here.
func (s *stage) everyChain(name, page string) {
	s.Helper()
	shown, base := map[string]bool{}, map[string]string{}
	for _, b := range blocksOf(page) {
		shown[b.command] = true
	}
	for _, b := range blocksOf(read(s.T, filepath.Join(folder, basis))) {
		base[b.command] = b.output
	}
	table := ""
	for _, m := range chains.FindAllStringSubmatch(s.run("iptables-save"), -1) {
		if m[1] != "" {
			table = m[1]
			continue
		}
		command := fmt.Sprintf("iptables -t %s -S %s", table, m[2])
		if !shown[command] && s.run(command) != base[command] {
			s.Errorf("%s: has no block for `%s`, and %s none that is like it", name, command, basis)
		}
	}
}

var names = regexp.MustCompile(`KPROXY-[A-Z0-9-]*[A-Z0-9]`)

// everyName checks that what the page's words name is there: a chain, a set, or
// the beginning of some.
func (s *stage) everyName(name, page string) {
	s.Helper()
	there := names.FindAllString(s.run("iptables-save; ipset list -n"), -1)
	for _, n := range names.FindAllString(prose(page), -1) {
		if !slices.ContainsFunc(there, func(t string) bool { return t == n || strings.HasPrefix(t, n+"-") }) {
			s.Errorf("%s speaks of %s, which isn't there", name, n)
		}
	}
}

// eventually waits until the service's status is as wanted.
func (s *stage) eventually(what string, want func(plan.ServiceStatus) bool) {
	s.Helper()
	var last plan.Status
	for deadline := time.Now().Add(s.within(30 * time.Second)); ; time.Sleep(50 * time.Millisecond) {
		st, err := s.client.Status(s.ctx)
		if err == nil {
			last = st
			if len(st.Services) == 1 && st.Alive && want(st.Services[0]) {
				return
			}
		}
		if time.Now().After(deadline) {
			s.Fatalf("waited for %s: %v, %+v", what, err, last)
		}
	}
}

func (s *stage) within(d time.Duration) time.Duration {
	return time.Duration(float64(d) * s.slow)
}

func (s *stage) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}
