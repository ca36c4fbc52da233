package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/urfave/cli/v2"
	"sigs.k8s.io/yaml"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
	"kproxy.dev/kproxy/web"
)

// printed holds what a command line printed, its error and its exit status.
type printed struct {
	stdout, stderr, err string
	status              int
}

func runLine(t *testing.T, args ...string) printed {
	t.Helper()
	var out, errs bytes.Buffer
	app := newApp()
	app.Writer, app.ErrWriter = &out, &errs
	err := run(t.Context(), app, append([]string{"kproxy"}, args...))
	p := printed{stdout: out.String(), stderr: errs.String()}
	if err != nil {
		p.err, p.status = err.Error(), statusOf(err)
	}
	return p
}

// fakeProxy is a kproxy that says what a test gives it, at a control socket.
type fakeProxy struct {
	status      plan.Status
	connections []plan.ConnectionStatus
	pins        []string
	traced      []trace.Request
	past        []plan.Event
	log         string
	config      map[string]any // what /configz shows, if there is more to see than an address
	// streams are what each that follows events is told before its stream ends.
	streams  [][]plan.Event
	mu       sync.Mutex // for streams and recorded
	recorded bool       // the recorder has its stream
}

func (f *fakeProxy) Status() plan.Status { return f.status }

func (f *fakeProxy) Connections(context.Context) ([]plan.ConnectionStatus, error) {
	return f.connections, nil
}

func (f *fakeProxy) Drain(bool) error { return nil }

func (f *fakeProxy) Pin(k service.Key, p service.Preference) error {
	f.pins = append(f.pins, k.String()+" "+string(p))
	return nil
}

// Subscribe serves the recorder first, then one client at a time.
func (f *fakeProxy) Subscribe() (<-chan plan.Event, func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	events := f.past
	if f.recorded {
		events, f.streams = f.streams[0], f.streams[1:]
	}
	f.recorded = true
	ch := make(chan plan.Event, len(events))
	for _, e := range events {
		ch <- e
	}
	close(ch)
	return ch, func() {}
}

func (f *fakeProxy) Health() web.HealthReport { return web.HealthReport{} }

func (f *fakeProxy) Trace(_ context.Context, req trace.Request) (trace.Result, error) {
	f.traced = append(f.traced, req)
	return trace.Result{Request: req}, nil
}

// serve answers at a socket until the test ends, and returns its path.
// served lists what its control socket serves.
func (f *fakeProxy) served(rec *web.Recorder) web.APIConfig {
	if f.config == nil {
		f.config = map[string]any{"kproxy.dev": map[string]any{"master": "https://example"}}
	}
	return web.APIConfig{Source: f, Recorder: rec, Gatherer: prometheus.NewRegistry(), Log: func() []byte { return []byte(f.log) }, Configz: f.config}
}

func (f *fakeProxy) serve(t *testing.T) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "kproxy.sock")
	ln, err := web.ListenControl(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	rec := web.NewRecorder(web.DefaultRecorderConfig(f))
	done := make(chan error, 2)
	go func() { done <- rec.Run(ctx) }()
	for len(rec.Timeline("", eventsAtMost)) < len(f.past) {
		time.Sleep(time.Millisecond)
	}
	go func() { done <- web.Serve(ctx, ln, web.Control(f.served(rec), nil), slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, <-done); err != nil {
			t.Error(err)
		}
	})
	return socket
}

// dns is a node with a service of two ports of one number, and one with a node port.
func dns() *fakeProxy {
	at := netip.MustParseAddrPort
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	port := func(namespace, name, port, protocol string, nodePort uint16, endpoint string, addresses ...netip.AddrPort) plan.ServiceStatus {
		return plan.ServiceStatus{
			Namespace: namespace, Name: name, Port: port, Protocol: protocol, Addresses: addresses, NodePort: nodePort,
			Algorithm: "round-robin", DataPlane: plan.Userspace, State: plan.StateQualifying, Reason: "its endpoints changed a moment ago", QualifiesInSeconds: 4,
			Endpoints: []plan.EndpointStatus{{Address: at(endpoint), Node: "n1", Ready: true, Serving: true, Weight: 1, Health: "up", Usable: true, Since: since}},
		}
	}
	return &fakeProxy{
		status: plan.Status{Version: "test", Mode: plan.ModeAuto, Node: "n1", Alive: true, Ready: true, Services: []plan.ServiceStatus{
			port("default", "web", "", "TCP", 30080, "10.2.0.2:9000", at("10.96.0.20:80"), at("[fd00::20]:80")),
			port("kube-system", "dns", "dns", "UDP", 0, "10.2.0.3:53", at("10.96.0.10:53")),
			port("kube-system", "dns", "dns-tcp", "TCP", 0, "10.2.0.3:53", at("10.96.0.10:53")),
		}},
		connections: []plan.ConnectionStatus{
			{Protocol: "tcp", Client: at("10.1.0.2:4000"), Service: "default/web", Address: at("10.1.0.1:30080"), Endpoint: at("10.2.0.2:9000"), DataPlane: plan.Userspace},
			{Protocol: "udp", Client: at("10.1.0.2:4001"), Service: "kube-system/dns:dns", Address: at("10.96.0.10:53"), Endpoint: at("10.2.0.3:53"), DataPlane: plan.IPTables},
		},
	}
}

// Flags may stand before arguments, after them, and between them.
func TestFlagsInAnyOrder(t *testing.T) {
	socket := dns().serve(t)
	for _, line := range []string{
		"status --socket S -o name default/web", "status default/web --socket S -o name", "status -o=name default/web --socket=S",
		"status --socket S -o name -- default/web", "status -o name --socket S 10.96.0.20:80/tcp",
	} {
		got := runLine(t, strings.Fields(strings.ReplaceAll(line, "S", socket))...)
		if got.stdout != "default/web\n" || got.status != 0 {
			t.Errorf("kproxy %s: %+v", line, got)
		}
	}
	// The words that name a command stay where they are.
	args, err := flagsFirst(newApp(), strings.Fields("kproxy lab up --backends 2 x --slow 3 -- --y"))
	if want := strings.Fields("kproxy lab up --backends 2 --slow 3 -- x --y"); err != nil || !slices.Equal(args, want) {
		t.Errorf("got %q (%v), want %q", args, err, want)
	}
}

// What one command prints of a service port, every command takes.
func TestCommandsTakeWhatOthersPrint(t *testing.T) {
	proxy := dns()
	socket := proxy.serve(t)
	for text, want := range map[string]string{
		"default/web": "default/web", "default/web:80": "default/web", "10.96.0.20:80": "default/web", "[fd00::20]:80/tcp": "default/web",
		"*:30080/tcp": "default/web", "10.1.0.1:30080": "default/web", "10.2.0.2:9000": "default/web",
		"kube-system/dns": "kube-system/dns:dns kube-system/dns:dns-tcp", "kube-system/dns:dns": "kube-system/dns:dns",
		"10.96.0.10:53/udp": "kube-system/dns:dns", "10.96.0.10:53/TCP": "kube-system/dns:dns-tcp", "10.96.0.10:53": "kube-system/dns:dns kube-system/dns:dns-tcp",
		"kube-system/dns:53": "kube-system/dns:dns kube-system/dns:dns-tcp", "10.2.0.3:53/udp": "kube-system/dns:dns",
	} {
		t.Run(text, func(t *testing.T) {
			status := runLine(t, "status", "--socket", socket, "-o", "name", text)
			if got := strings.Join(strings.Fields(status.stdout), " "); got != want {
				t.Errorf("status: %q (%s), want %q", got, status.err, want)
			}
			connections := runLine(t, "connections", "--socket", socket, "-o", "json", text)
			var rows []plan.ConnectionStatus
			if err := json.Unmarshal([]byte(connections.stdout), &rows); err != nil {
				t.Fatalf("connections: %v: %+v", err, connections)
			}
			for _, row := range proxy.connections {
				if listed := slices.Contains(rows, row); listed != slices.Contains(strings.Fields(want), row.Service) {
					t.Errorf("connections: %+v is listed: %v", row, listed)
				}
			}
			proxy.pins = nil
			pin := runLine(t, "pin", text, "kernel", "--socket", socket)
			var pinned []string
			for _, p := range proxy.pins {
				pinned = append(pinned, strings.TrimSuffix(p, " kernel"))
			}
			if got := strings.Join(pinned, " "); got != want || pin.err != "" {
				t.Errorf("pin: %q (%s), want %q", got, pin.err, want)
			}
		})
	}
}

func TestTraceTakesWhatOthersPrint(t *testing.T) {
	proxy := dns()
	socket := proxy.serve(t)
	at := netip.MustParseAddrPort
	for line, want := range map[string]trace.Request{
		"10.96.0.10:53/udp":                            {Address: at("10.96.0.10:53"), Protocol: service.UDP},
		"10.96.0.10:53/udp --proto udp":                {Address: at("10.96.0.10:53"), Protocol: service.UDP},
		"10.96.0.10:53 --from 10.1.0.2":                {Address: at("10.96.0.10:53"), Protocol: service.TCP, From: netip.MustParseAddr("10.1.0.2")},
		"10.96.0.10:53 --from 10.1.0.2:4001":           {Address: at("10.96.0.10:53"), Protocol: service.TCP, From: netip.MustParseAddr("10.1.0.2")},
		"default/web --from fd00::2":                   {Address: at("[fd00::20]:80"), Protocol: service.TCP, From: netip.MustParseAddr("fd00::2")},
		"kube-system/dns --proto udp --from=10.1.0.2":  {Address: at("10.96.0.10:53"), Protocol: service.UDP, From: netip.MustParseAddr("10.1.0.2")},
		"--proto udp kube-system/dns:53 --from=::ffff": {},
	} {
		proxy.traced = nil
		got := runLine(t, append([]string{"trace", "--socket", socket, "-o", "json"}, strings.Fields(line)...)...)
		if !want.Address.IsValid() {
			if got.status != exitUsage || !strings.Contains(got.err, "no UDP port with an address of the client's family") && !strings.Contains(got.err, "no udp port with an address of the client's family") {
				t.Errorf("%s: %+v", line, got)
			}
			continue
		}
		if len(proxy.traced) != 1 || proxy.traced[0].Address != want.Address || proxy.traced[0].Protocol != want.Protocol || proxy.traced[0].From != want.From {
			t.Errorf("%s: traced %+v, want %+v (%s)", line, proxy.traced, want, got.err)
		}
	}
	for line, want := range map[string]string{
		"10.96.0.10:53/udp --proto tcp": "contradicts", "10.96.0.10:53/sctp": "neither tcp nor udp", "*:30080/tcp": "name one", "default/wbe": "did you mean default/web?",
		"10.96.0.10": "ADDRESS:PORT",
	} {
		if got := runLine(t, append([]string{"trace", "--socket", socket}, strings.Fields(line)...)...); got.status != exitUsage || !strings.Contains(got.err, want) {
			t.Errorf("%s: %+v, want %q", line, got, want)
		}
	}
}

// What is wrong with a command line is said with what would be right.
func TestWrongCommandLines(t *testing.T) {
	socket := dns().serve(t)
	for line, want := range map[string]string{
		"stauts":                            `there is no command "kproxy stauts", did you mean status? (see kproxy --help)`,
		"frobnicate":                        `there is no command "kproxy frobnicate" (see kproxy --help)`,
		"help stauts":                       `there is no command "kproxy stauts", did you mean status?`,
		"lab dwon":                          `there is no command "kproxy lab dwon", did you mean down? (see kproxy lab --help)`,
		"status default/web --sokcet S":     "there is no flag --sokcet, did you mean --socket? (see kproxy status --help)",
		"status --socket S default/wbe":     "there is no service default/wbe, did you mean default/web?",
		"status --socket S 10.9.9.9:1":      "no service has the address 10.9.9.9:1; kproxy status lists what there is",
		"status web --socket S":             `"web" is neither NAMESPACE/NAME[:PORT] nor ADDRESS:PORT[/PROTOCOL]`,
		"status --socket S a/b c/d":         "status takes one service at most",
		"status --socket":                   "--socket needs a value (see kproxy status --help)",
		"status default/web --socket":       "--socket needs a value (see kproxy status --help)",
		"--socket S status":                 "there is no flag --socket here; a command's flags come after its name (see kproxy --help)",
		"status --socket S -o jsn":          `--output: "jsn" is not one of table, wide, json, yaml, name, did you mean json?`,
		"connections --socket S --sort ag":  `--sort: "ag" is not one of service, bytes, age, did you mean age?`,
		"pin default/web kernl --socket S":  `data plane: "kernl" is not one of userspace, kernel, auto, did you mean kernel?`,
		"run --offload-after 10":            `--offload-after: "10" has no unit: write 10s for seconds, 10m for minutes (see kproxy run --help)`,
		"run --offload-after soon":          `--offload-after: "soon" is not a duration such as 500ms, 10s or 1m30s`,
		"run --offload-min-connections 1.5": `--offload-min-connections: "1.5" is not a whole number`,
		"run --kube-api-qps x":              `--kube-api-qps: "x" is not a number`,
		"run --profiling=maybe":             `--profiling: "maybe" is neither true nor false`,
		"run --manifets /m":                 "there is no flag --manifets, did you mean --manifests?",
		"run --manifests /m --mode iptable": `--mode: "iptable" is not a mode; use one of auto, userspace, iptables, ipvs, nftables, did you mean iptables?`,
		"lab up --mode ipsv":                `--mode: "ipsv" is not one of auto, userspace, iptables, ipvs, nftables, did you mean ipvs?`,
	} {
		args := strings.Fields(line)
		for i := range args {
			if args[i] == "S" {
				args[i] = socket
			}
		}
		got := runLine(t, args...)
		if !strings.HasPrefix(got.err, want) {
			t.Errorf("kproxy %s: %q, want %q", line, got.err, want)
		}
		wantStatus := exitUsage
		if strings.Contains(want, "no service") {
			wantStatus = exitFailed
		}
		if got.status != wantStatus {
			t.Errorf("kproxy %s: exit status %d, want %d", line, got.status, wantStatus)
		}
	}
}

func TestOutputs(t *testing.T) {
	proxy := dns()
	socket := proxy.serve(t)
	for _, args := range [][]string{{"status"}, {"connections"}, {"trace", "10.96.0.20:80"}} {
		var asJSON, asYAML any
		j := runLine(t, append(args, "-o", "json", "--socket", socket)...)
		y := runLine(t, append(args, "-o", "yaml", "--socket", socket)...)
		if err := errors.Join(json.Unmarshal([]byte(j.stdout), &asJSON), yaml.Unmarshal([]byte(y.stdout), &asYAML)); err != nil || asJSON == nil {
			t.Errorf("%s: %v\n%s%s", args, err, j.err, y.err)
		}
		if d := cmp.Diff(asJSON, asYAML); d != "" {
			t.Errorf("%s: JSON and YAML differ:\n%s", args, d)
		}
		if !strings.HasPrefix(y.stdout, "---\n") {
			t.Errorf("%s: the YAML begins with %.20q", args, y.stdout)
		}
	}
	if got, want := runLine(t, "status", "-o", "name", "--socket", socket).stdout, "default/web\nkube-system/dns:dns\nkube-system/dns:dns-tcp\n"; got != want {
		t.Errorf("names %q, want %q", got, want)
	}
}

func TestHelp(t *testing.T) {
	all := runLine(t)
	for _, args := range [][]string{{"help"}, {"--help"}, {"-h"}} {
		if got := runLine(t, args...); got != all || got.status != 0 {
			t.Errorf("%s: %+v", args, got)
		}
	}
	for _, heading := range []string{"Inspect:", "Run:", "Validate and preview:", "Try it on one machine:"} {
		if !strings.Contains(all.stdout, "\n   "+heading+"\n") {
			t.Errorf("the help has no heading %s:\n%s", heading, all.stdout)
		}
	}
	for _, args := range []string{"help run", "run --help", "run -h"} {
		got := runLine(t, strings.Fields(args)...)
		for _, heading := range []string{"Services", "Conntrack", "IPVS", "Offload", "Without effect, for kube-proxy's command lines"} {
			if !strings.Contains(got.stdout, "\n   "+heading+"\n") {
				t.Errorf("%s has no heading %q", args, heading)
			}
		}
	}
	if got := runLine(t, "help", "lab", "up"); !strings.Contains(got.stdout, "kproxy lab up - ") {
		t.Errorf("help lab up: %+v", got)
	}
	if got, want := runLine(t, "--version"), runLine(t, "version"); got != want || !strings.HasPrefix(got.stdout, "kproxy "+version) {
		t.Errorf("--version: %+v, want %+v", got, want)
	}
}

// Every command has a heading, and every flag of run but a few of its own.
func TestEverythingHasAHeading(t *testing.T) {
	for _, c := range newApp().Commands {
		if c.Category == "" {
			t.Errorf("command %s has none", c.Name)
		}
	}
	own := []string{"config", "write-config-to", "init-only", "version", "cleanup"}
	for _, f := range runFlags() {
		c, ok := f.(cli.CategorizableFlag)
		if !ok || (c.GetCategory() == "") != slices.Contains(own, f.Names()[0]) {
			t.Errorf("flag --%s has heading %q", f.Names()[0], c.GetCategory())
		}
	}
}

func TestTheLabIsFound(t *testing.T) {
	dir := t.TempDir()
	dead := filepath.Join(dir, "dead.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	none, one, other := filepath.Join(dir, "none.sock"), dns().serve(t), dns().serve(t)
	for _, tt := range []struct{ host, lab, want string }{
		{one, other, one}, {none, other, other}, {dead, other, other}, {none, none, none}, {dead, dead, dead}, {one, none, one},
	} {
		if got := socketOf(tt.host, tt.lab); got != tt.want {
			t.Errorf("%s beside a lab's %s: %s, want %s", tt.host, tt.lab, got, tt.want)
		}
	}
}

// TestStrayArguments: a command that takes no arguments does nothing if it gets some. `cleanup dry-run` removes nothing.
func TestStrayArguments(t *testing.T) {
	for _, line := range []string{"cleanup --dry-run stray", "check --manifests testdata stray", "render --manifests testdata stray", "version stray", "man stray", "ready stray", "drain stray", "run stray"} {
		if got := runLine(t, strings.Fields(line)...); got.status != exitUsage || got.stdout != "" || !strings.Contains(got.err, `takes no arguments, got ["stray"]`) {
			t.Errorf("%s: status %d, %q", line, got.status, got.err)
		}
	}
}
