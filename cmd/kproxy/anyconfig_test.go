package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/test/program"
)

// TestAnyConfiguration: any combination of flags and of fields of a
// KubeProxyConfiguration either starts and carries traffic, or ends with status 2
// or 3 and says why, before the host was changed.
func TestAnyConfiguration(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	outsideOfPods(t)
	seed, count := number64(t, "KPROXY_SEED", uint64(time.Now().UnixNano())), number64(t, "KPROXY_CONFIGURATIONS", 30)
	t.Logf("the same configurations again: KPROXY_SEED=%d KPROXY_CONFIGURATIONS=%d", seed, count)
	h := newHost(t)
	r := rand.New(rand.NewPCG(seed, 0))
	served, refused := 0, map[int]int{}
	for i := range count {
		c := randomConfiguration(r, h, i)
		if status := h.try(t, c); status < 0 {
			served++
		} else {
			refused[status]++
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d served, refused by status: %v", served, refused)
	if count >= 30 && (served == 0 || refused[exitUsage] == 0) {
		t.Error("the configurations are all alike")
	}
}

// number64 reads a number from a variable of the environment.
func number64(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// busyPort is taken by another program on the node.
const busyPort = "9999"

// host is a node with a client and endpoints of a service.
type host struct {
	kproxy, dir, manifests string
	net                    *lab.Network
	service                lab.Manifest
	state                  state
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{dir: t.TempDir()}
	var err error
	if h.kproxy, err = program.Kproxy(h.dir); err != nil {
		t.Fatal(err)
	}
	cfg := lab.DefaultConfig()
	cfg.Prefix, cfg.Backends = fmt.Sprintf("kpa-%d", os.Getpid()), 1
	h.net = lab.New(cfg)
	if err := h.net.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.net.Down(); err != nil {
			t.Errorf("take the lab down: %v", err)
		}
	})
	busy, err := h.net.Node.Listen(t.Context(), "tcp", "127.0.0.1:"+busyPort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { busy.Close() })
	h.manifests = filepath.Join(h.dir, "manifests")
	h.service = lab.NewManifest("web", 10, h.net.Backends...)
	if err := errors.Join(os.Mkdir(h.manifests, 0o755), h.service.Write(h.manifests)); err != nil {
		t.Fatal(err)
	}
	h.state = h.look(t)
	return h
}

// configuration is a command line, and the file that it names with --config, if any.
type configuration struct {
	args []string
	file string
}

func (c configuration) String() string {
	text := "kproxy run " + strings.Join(c.args, " ")
	if c.file != "" {
		text += "\nwith the file\n" + c.file
	}
	return text
}

// try runs c and returns the status that it ended with, -1 if it served. The host is
// afterwards as it was.
func (h *host) try(t *testing.T, c configuration) int {
	t.Helper()
	p := &lab.Process{Namespace: h.net.Node, Path: h.kproxy, Args: append([]string{"run"}, c.args...)}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if t.Failed() {
			t.Logf("%s\nprinted:\n%s", c, p.Log())
		}
		if p.Running() {
			_ = p.Kill()
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for p.Running() {
		err := h.ask(ctx, 200*time.Millisecond)
		if err == nil {
			h.stop(t, p, c)
			return -1
		}
		if ctx.Err() != nil {
			t.Errorf("it neither carries traffic nor ends: %v", err)
			return -1
		}
	}
	var exit *exec.ExitError
	if err := p.Wait(ctx); !errors.As(err, &exit) {
		t.Errorf("it ends with %v", err)
		return -1
	}
	status := exit.ExitCode()
	if status != exitUsage && status != exitHost {
		t.Errorf("it ends with status %d", status)
	}
	said := p.Log()[strings.LastIndex("\n"+p.Log(), "\nkproxy: "):]
	if !strings.HasPrefix(said, "kproxy: ") || strings.Contains(said, "goroutine ") || slices.Contains(strings.Split(strings.TrimSuffix(said, "\n"), "\n"), "") {
		t.Errorf("it doesn't say why")
	}
	if diff := cmp.Diff(h.state, h.look(t)); diff != "" {
		t.Errorf("it has changed the host before it ended (-before +after):\n%s", diff)
	}
	return status
}

// ask has the client and the node itself talk to the service, by both families. It waits
// so long for the first answer, and patiently for the others.
func (h *host) ask(ctx context.Context, first time.Duration) error {
	within := first
	for _, address := range h.service.ClusterIPs {
		for _, network := range []string{"tcp", "udp"} {
			for _, from := range []*lab.Namespace{h.net.Client, h.net.Node} {
				ctx, cancel := context.WithTimeout(ctx, within)
				_, err := from.Ask(ctx, network, netip.AddrPortFrom(address, 80), "hello")
				cancel()
				if err != nil {
					return fmt.Errorf("%s to %s from %s: %w", network, address, from.Name, err)
				}
				within = 2 * time.Second
			}
		}
	}
	return nil
}

// stop ends kproxy, removes what it has left, and sets the kernel's settings back.
func (h *host) stop(t *testing.T, p *lab.Process, c configuration) {
	t.Helper()
	if err := p.Stop(20 * time.Second); err != nil {
		t.Errorf("stop: %v", err)
	}
	cleanup := []string{"cleanup"} // which has to be told what table it was, and nothing else
	if at := slices.IndexFunc(c.args, func(a string) bool { return strings.HasPrefix(a, "--route-table=") }); at >= 0 {
		cleanup = append(cleanup, c.args[at])
	}
	if out, err := h.net.Node.Output(t.Context(), h.kproxy, cleanup...); err != nil {
		t.Errorf("kproxy cleanup: %v\n%s", err, out)
	}
	for name, value := range h.look(t) {
		was := h.state[name]
		if strings.HasPrefix(name, "/proc/sys/") && was != value {
			if err := h.net.Node.Do(func() error { return os.WriteFile(name, []byte(was), 0o644) }); err != nil {
				t.Errorf("set %s back: %v", name, err)
			}
		}
	}
	if err := os.RemoveAll(filepath.Join(h.dir, "own")); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(h.state, h.look(t)); diff != "" {
		t.Errorf("cleanup leaves (-before +after):\n%s", diff)
	}
}

// state holds what a proxy can change of a host: by name, what is there.
type state map[string]string

// look reads the node's state.
func (h *host) look(t *testing.T) state {
	t.Helper()
	out := state{}
	for _, command := range []string{
		"iptables-save", "ip6tables-save", "ipset save", "ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all", "ip -brief addr",
	} {
		text, err := h.net.Node.Command(t.Context(), "sh", "-c", command).Output()
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		out[command] = ofNetfilter.ReplaceAllString(string(text), "")
	}
	err := h.net.Node.Do(func() error {
		for _, root := range []string{"/proc/sys/net/ipv4", "/proc/sys/net/ipv6", "/proc/sys/net/netfilter"} {
			err := filepath.Walk(root, func(path string, info os.FileInfo, err error) error {
				if err != nil || info.IsDir() || info.Mode().Perm()&0o200 == 0 {
					return err
				}
				if text, err := os.ReadFile(path); err == nil { // some can't be read
					out[path] = string(text)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.Walk(h.dir, func(path string, info os.FileInfo, err error) error {
		if err == nil && !info.IsDir() {
			out[path] = info.Mode().String()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// ofNetfilter are the lines that say nothing of rules: remarks with the time, tables
// and built-in chains, which come into being when somebody looks, and their counters.
var ofNetfilter = regexp.MustCompile(`(?m)^(#.*|\*.*|COMMIT|:[A-Z]+ (ACCEPT|DROP) .*)\n`)

// randomConfiguration takes some of the flags of kproxy run, and half the time a file
// with some of the fields of a KubeProxyConfiguration. Most values are good ones.
func randomConfiguration(r *rand.Rand, h *host, n uint64) configuration {
	own := filepath.Join(h.dir, "own")
	given := map[string]string{
		"manifests": h.manifests, "socket": filepath.Join(own, "kproxy.sock"), "state-dir": filepath.Join(own, "state"), "drain-timeout": "0s",
	}
	flags := slices.DeleteFunc(runFlags(), func(f cli.Flag) bool { return slices.Contains(notTried, f.Names()[0]) })
	for range r.IntN(8) {
		f := flags[r.IntN(len(flags))]
		given[f.Names()[0]] = choose(r, h.flagValues(f))
	}
	var c configuration
	if r.IntN(2) == 0 {
		name := filepath.Join(h.dir, fmt.Sprintf("config-%d.yaml", n))
		c.file = h.randomFile(r)
		if err := os.WriteFile(name, []byte(c.file), 0o644); err != nil {
			panic(err)
		}
		h.state[name] = "-rw-r--r--"
		given["config"] = name
	}
	for _, f := range runFlags() {
		if v, ok := given[f.Names()[0]]; ok {
			c.args = append(c.args, "--"+f.Names()[0]+"="+v)
		}
	}
	return c
}

// notTried are flags that ask for something else than to serve, and --config, which has
// a way of its own.
var notTried = []string{"version", "write-config-to", "init-only", "config"}

// values are some of a flag or field, good ones and bad ones.
type values struct{ good, bad []string }

func choose(r *rand.Rand, v values) string {
	if len(v.good) == 0 || len(v.bad) > 0 && r.IntN(8) == 0 {
		return v.bad[r.IntN(len(v.bad))]
	}
	return v.good[r.IntN(len(v.good))]
}

func list(s string) []string { return strings.Fields(s) }

// flagValues are f's: those of its name, or else of its type.
func (h *host) flagValues(f cli.Flag) values {
	if v, ok := h.special()[f.Names()[0]]; ok {
		return v
	}
	switch f.(type) {
	case *cli.BoolFlag:
		return values{list("true false"), list("maybe")}
	case *cli.IntFlag:
		return values{list("1 2 3"), list("-1 many 99999999999999999999")}
	case *cli.Float64Flag:
		return values{list("5 0.5 -1"), list("NaN 1e300 fast")}
	case *cli.DurationFlag:
		return values{list("0s 1s 5m"), list("-1s 10 soon")}
	}
	return values{good: []string{"", "text"}} // of one that is ignored
}

// special are the values of flags whose type doesn't say enough. In none of them the
// service isn't kproxy's to carry.
func (h *host) special() map[string]values {
	file := filepath.Join(h.manifests, "web.yaml")
	paths := values{[]string{filepath.Join(h.dir, "own", "deep", "er")}, []string{"relative", file, file + "/below", "/proc/none/such", "", "/" + strings.Repeat("long", 40)}}
	bind := func(port int) values {
		return values{
			[]string{"", "127.0.0.1", fmt.Sprintf("127.0.0.1:%d", port), fmt.Sprintf("[::]:%d", port+100), fmt.Sprintf("10.1.0.1:%d", port)},
			[]string{"192.0.2.99:4444", "nowhere", "10.1.0.1:0", ":80", "127.0.0.1:" + busyPort},
		}
	}
	port := values{list("0 10300 12345"), list("-1 70000 many " + busyPort)}
	return map[string]values{
		"mode":                              {config.Modes[:3], list("nftables kernelspace ipvs")},
		"proxy-mode":                        {[]string{"", "iptables", "nftables"}, list("userland")},
		"manifests":                         {[]string{h.manifests, file}, []string{"", "/nonexistent", h.manifests + ",/nonexistent"}},
		"kubeconfig":                        {nil, []string{"/nonexistent", file}},
		"master":                            {nil, list("https://192.0.2.1:6443 :://")},
		"hostname-override":                 {list("node Node-1"), []string{"a_b", strings.Repeat("n", 300)}},
		"bind-address":                      {list("0.0.0.0 :: 10.1.0.1"), list("10.1.0 nowhere")},
		"node-ip":                           {list("10.1.0.1 fd00:1::1 10.1.0.1,fd00:1::1"), list("0.0.0.0 224.0.0.1 10.1.0.1,10.1.0.2 x")},
		"cluster-cidr":                      {list("10.2.0.0/24 fd00:2::/64 10.2.0.0/24,fd00:2::/64"), list("10.2.0.0 10.2.0.0/24,10.3.0.0/24 x")},
		"exclude-cluster-cidr":              {list("203.0.113.0/24 2001:db8::/32"), list("x 10.2.0.1")},
		"service-cidr":                      {list("10.96.0.0/12 fd00:96::/112 10.96.0.0/12,10.96.0.0/16"), list("x 10.96.0.0")},
		"detect-local-mode":                 {list("ClusterCIDR NodeCIDR"), list("Magic BridgeInterface")},
		"pod-bridge-interface":              {list("cni0"), []string{"a/b", strings.Repeat("n", 16)}},
		"pod-interface-name-prefix":         {list("veth"), []string{"a b"}},
		"nodeport-addresses":                {list("primary localhost all 10.1.0.0/24"), list("secondary 10.1.0.0")},
		"iptables-masquerade-bit":           {list("0 14 20"), list("32 -1 x")},
		"transparent-bit":                   {list("1 17 31"), list("0 32 14")},
		"route-table":                       {list("1 252 10249 2147483647"), list("0 253 254 255 -5")},
		"alive-timeout":                     {list("3s 1h"), list("0s 500ms 2h")},
		"health-check":                      {list("off tcp http udp grpc"), list("icmp")},
		"health-interval":                   {list("1s 10s"), list("1ms 2h x")},
		"health-timeout":                    {list("1s 100ms"), list("0s -1s 1h")},
		"health-rise":                       {list("1 100"), list("0 101")},
		"health-fall":                       {list("1 100"), list("0 101")},
		"conntrack-max-per-core":            {list("0 1000"), list("-1 99999999999")}, // more would take this machine's memory
		"conntrack-min":                     {list("0 1000"), list("-1 99999999999")},
		"conntrack-tcp-timeout-established": {list("0s 1s 24h 2147483s"), list("-1s 1500ms 2147484s 2147483648s")},
		"conntrack-tcp-timeout-close-wait":  {list("0s 1s 24h 2147483s"), list("-1s 1500ms 2147484s 2147483648s")},
		"conntrack-udp-timeout":             {list("0s 10s 24h 2147483s"), list("-1s 1500ms 2147484s 2147483648s")},
		"conntrack-udp-timeout-stream":      {list("0s 10s 24h 2147483s"), list("-1s 1500ms 2147484s 2147483648s")},
		"ipvs-scheduler":                    {list("rr wlc"), list("best not-a-scheduler")},
		"ipvs-tcp-timeout":                  {list("15m 0 conntrack"), list("15 forever -1s 1500ms")},
		"ipvs-tcpfin-timeout":               {list("0s 10s"), list("-1s 1500ms 9999999h")},
		"ipvs-udp-timeout":                  {list("0s 10s"), list("-1s 1500ms 9999999h")},
		"metrics-bind-address":              bind(config.MetricsPort),
		"healthz-bind-address":              bind(config.HealthzPort),
		"metrics-port":                      port,
		"healthz-port":                      port,
		"listen-tcp-port":                   port,
		"listen-udp-port":                   port,
		"metrics-service-limit":             {list("1 1000"), list("-1 2000000")},
		"metrics-endpoint-limit":            {list("1 1000"), list("-1 2000000")},
		"grafana-url":                       {list("https://grafana.example http://10.0.0.1:3000/grafana"), list("grafana.example ftp://g")},
		"socket":                            paths,
		"state-dir":                         paths,
		"oom-score-adj":                     {list("0 1000"), list("-1001 x")},
		"log-format":                        {config.LogFormats, list("xml")},
		"v":                                 {list("debug info warn error 0 4 10"), list("loud -1")},
		"cleanup":                           {list("false"), list("true")},
	}
}

// randomFile is a KubeProxyConfiguration with some of the fields that there are.
func (h *host) randomFile(r *rand.Rand) string {
	if r.IntN(20) == 0 {
		return []string{"", "kind: Servce\n", "apiVersion: v1\nkind: Service\n", "{", "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmood: auto\n"}[r.IntN(5)]
	}
	fields := config.Fields()
	root := map[string]any{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
	for range r.IntN(8) {
		f := fields[r.IntN(len(fields))]
		at := root
		path := strings.Split(f.Path, ".")
		for _, p := range path[:len(path)-1] {
			if at[p] == nil {
				at[p] = map[string]any{}
			}
			at = at[p].(map[string]any)
		}
		at[path[len(path)-1]] = h.fieldValue(r, f)
	}
	text, err := yaml.Marshal(root)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// fieldValue is one that f's type in Go may hold, mostly; values are those of the flag
// that sets the same.
func (h *host) fieldValue(r *rand.Rand, f config.Field) any {
	t := fieldType(reflect.TypeFor[v1alpha1.KubeProxyConfiguration](), strings.Split(f.Path, "."))
	v, known := h.special()[f.Flag()]
	if f.Path == "clientConnection.kubeconfig" {
		v.good = []string{""} // and --manifests wins over the bad ones
	}
	text := func(otherwise values) string {
		if known {
			return choose(r, v)
		}
		return choose(r, otherwise)
	}
	switch {
	case t == nil:
		panic("KubeProxyConfiguration has no " + f.Path)
	case t == reflect.TypeFor[metav1.Duration]():
		return text(values{list("0s 1s 5m"), list("-1s soon")})
	case t.Kind() == reflect.Bool:
		return r.IntN(2) == 0
	case t.Kind() == reflect.Slice:
		return []string{text(values{list("10.0.0.0/8"), list("x")})}
	case t.Kind() == reflect.Map:
		return map[string]bool{"Anything": true}
	case t.Kind() == reflect.String, t.Kind() == reflect.Struct: // a resource.Quantity
		return text(values{[]string{""}, []string{"text"}})
	}
	number := text(values{list("1 2 3"), list("-1")})
	if n, err := strconv.ParseFloat(number, 64); err == nil {
		return n
	}
	return number
}

// fieldType finds a field by its names in JSON.
func fieldType(t reflect.Type, path []string) reflect.Type {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if len(path) == 0 {
		return t
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	for i := range t.NumField() {
		name, rest, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if name == path[0] {
			return fieldType(t.Field(i).Type, path[1:])
		}
		if name == "" && (t.Field(i).Anonymous || rest == "inline") {
			if found := fieldType(t.Field(i).Type, path); found != nil {
				return found
			}
		}
	}
	return nil
}
