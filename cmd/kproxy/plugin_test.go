package main

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/cmd/kproxy/cluster"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// A report has a line a node, those that don't answer among them, and a line a service.
func TestPluginReport(t *testing.T) {
	since := time.Date(2026, 11, 24, 12, 0, 0, 0, time.Local)
	r := &cluster.Report{
		Nodes: []cluster.NodeReport{
			{Node: "n1", State: "alive", Version: "v1", Mode: "auto", Services: 1, Active: 2},
			{Node: "n2", State: cluster.Forbidden, Error: `User "u" cannot create resource "pods/portforward"`},
		},
		Services: []cluster.ServiceReport{{
			Namespace: "default", Name: "web", Port: "http", Protocol: "TCP", Addresses: []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:80")},
			DataPlanes: map[plan.DataPlane]int{plan.Userspace: 2, "nftables": 5}, Endpoints: 3, Up: 2, Nodes: 7,
			Differences: []cluster.Difference{
				{Node: "n3", What: "in userspace", Since: since, Why: "refused"}, {Node: "n4", What: "in userspace", Since: since.Add(-time.Hour)},
				{Node: "n5", What: "in userspace"}, {Node: "n6", What: "in userspace"}, {Node: "n7", What: "doesn't have it"},
			},
		}},
	}
	var out bytes.Buffer
	if err := printReport(&out, r, false); err != nil {
		t.Fatal(err)
	}
	want := `NODE  STATE      VERSION  MODE  SERVICES  ACTIVE  NOTE
n1    alive      v1       auto  1         2       
n2    forbidden  -        -     0         0       User "u" cannot create resource "pods/portforward"

SERVICE           ADDRESS           DATA PLANE               ENDPOINTS  ACTIVE  TOTAL  FAILED  NODES  DIFFER
default/web:http  10.96.0.1:80/tcp  nftables 5, userspace 2  2/3        0       0      0       7      n3, n4, n5 and 1 more in userspace since 2026-11-24 11:00:00 (refused); n7 doesn't have it
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	out.Reset()
	if err := printReport(&out, r, true); err != nil || !strings.Contains(out.String(), "\n  n7 doesn't have it\n") {
		t.Errorf("wide: %v\n%s", err, out.String())
	}
}

// Rates are those between two samples, also of a kproxy that has begun anew, and the busiest come first.
func TestPluginTop(t *testing.T) {
	row := func(name string, total, bytes uint64) plan.ServiceStatus {
		return plan.ServiceStatus{Namespace: "default", Name: name, Protocol: "TCP", Connections: plan.Connections{Active: 1, Total: total, BytesIn: bytes}}
	}
	status := func(rows ...plan.ServiceStatus) plan.Status { return plan.Status{Services: rows} }
	answers := []cluster.Answer[sample]{
		{Node: cluster.Node{Name: "n1"}, Value: sample{status(row("a", 10, 0), row("b", 10, 100)), status(row("a", 20, 0), row("b", 30, 300)), 2}},
		{Node: cluster.Node{Name: "n2"}, Value: sample{status(row("b", 90, 900)), status(row("b", 4, 400)), 2}},
		{Node: cluster.Node{Name: "n3"}, Trouble: &cluster.Trouble{State: cluster.TimedOut}},
	}
	want := []carried{{Name: "default/b/tcp", Active: 2, New: 12, BytesIn: 300}, {Name: "default/a/tcp", Active: 1, New: 5}}
	if diff := cmp.Diff(want, loads(answers, false)); diff != "" {
		t.Errorf("services (-want +got):\n%s", diff)
	}
	want = []carried{{Name: "n2", Active: 1, New: 2, BytesIn: 200}, {Name: "n1", Active: 2, New: 15, BytesIn: 100}}
	if diff := cmp.Diff(want, loads(answers, true)); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
}

// What is wrong on the command line is said before any node is asked.
func TestPluginUsage(t *testing.T) {
	t.Setenv("KUBECONFIG", t.TempDir()+"/none")
	t.Setenv("HOME", t.TempDir())
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for line, want := range map[string]string{
		"stauts":                      `there is no command "kubectl-kproxy stauts", did you mean status?`,
		"status a b":                  "takes 1 arguments at most",
		"status --nod x":              "there is no flag --nod, did you mean --node?",
		"status --kubeconfig /none":   "/none",
		"status":                      "find the cluster: ",
		"trace default/web":           "trace takes a client",
		"trace web svc/web":           "neither pod/NAME nor node/NAME",
		"trace pod/a svc/b --proto x": `--proto "x" is neither tcp nor udp`,
		"trace node/a svc/b --in-pod": "--in-pod out",

		"trace node/a 10.0.0.1:53/udp --proto tcp": `--proto tcp contradicts "10.0.0.1:53/udp"`,
		"trace node/a 10.0.0.1:53/sctp":            `"10.0.0.1:53/sctp" is neither tcp nor udp`,
		"trace node/a *:30080":                     "name one, such as 192.0.2.1:30080",
		"trace node/a web":                         "neither NAMESPACE/NAME[:PORT] nor",

		"pin svc/web":            "pin takes a service and one of",
		"pin svc/web kernal":     "did you mean kernel?",
		"top pods":               "is not one of services, nodes",
		"top --interval 1m":      "is not between 0 and --timeout",
		"events --limit 0":       "0 is not from 1 to 2000",
		"connections --limit -1": "limit -1 is less than 0",
		"status --timeout 0s":    "--timeout: 0s is not more than 0",
		"ui --timeout -1s":       "--timeout: -1s is not more than 0",
	} {
		t.Run(line, func(t *testing.T) {
			err := run(t.Context(), newPlugin(), append([]string{pluginName}, strings.Fields(line)...))
			if err == nil || !strings.Contains(err.Error(), want) || statusOf(err) != exitUsage {
				t.Errorf("%v, status %d, want status 2 and %q", err, statusOf(err), want)
			}
		})
	}
}

// A service that no node has which answers may be on one that doesn't: that is said of each.
func TestPluginUnknownService(t *testing.T) {
	answers := []cluster.Answer[plan.Status]{
		{Node: cluster.Node{Name: "n1"}, Value: plan.Status{Services: []plan.ServiceStatus{{Namespace: "default", Name: "server", Protocol: "TCP"}}}},
		{Node: cluster.Node{Name: "n2"}, Trouble: &cluster.Trouble{State: cluster.TimedOut, Text: "not within 5s"}},
	}
	which, err := clusterTarget("svc/servr", "default")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err = keepMatching(&out, answers, which)
	if got, want := fmt.Sprintf("%skproxy: %v", out.String(), err), "kproxy: node n2: timed out: not within 5s\nkproxy: there is no service default/servr, did you mean default/server?\n1 of 2 nodes didn't answer"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// A port forward finds the API on the node's loopback, wherever else it is served.
func TestLoopbackBeside(t *testing.T) {
	for address, want := range map[string]string{
		"127.0.0.1:10249": "", "[::1]:10249": "", "0.0.0.0:10249": "", "[::]:10249": "", "": "",
		"192.0.2.1:10249": "127.0.0.1:10249", "[2001:db8::1]:9000": "127.0.0.1:9000",
	} {
		if got := loopbackBeside(address); got != want {
			t.Errorf("%s: %q, want %q", address, got, want)
		}
	}
}

// TestPlainWriter: what others name commands no terminal.
func TestPlainWriter(t *testing.T) {
	const colours = "\x1b[31;1mred\x1b[0m "
	for _, c := range []struct {
		colours bool
		want    string
	}{
		{false, `\u001b[31;1mred\u001b[0m `},
		{true, colours},
	} {
		file, err := os.Create(filepath.Join(t.TempDir(), "out"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		fmt.Fprint(&plainWriter{to: file, colours: c.colours}, colours+"a\x1b[2Jb\tc\u009b1mé\r\n")
		if got, err := os.ReadFile(file.Name()); err != nil || string(got) != c.want+`a\u001b[2Jb`+"\t"+`c\u009b1mé\u000d`+"\n" {
			t.Errorf("%q, %v", got, err)
		}
	}
}

// TestDrift: what a node's kproxy lacks is told where its kernel can't be compared, and the other way round.
func TestDrift(t *testing.T) {
	var b service.Builder
	if err := b.AddPort(service.Port{Key: service.Key{Namespace: "default", Name: "web", Port: "http", Protocol: service.TCP}}); err != nil {
		t.Fatal(err)
	}
	api := b.Build()
	late := &cluster.Trouble{State: cluster.TimedOut, Text: "not within 10s"}
	nodes := []cluster.Node{{Name: "n1"}, {Name: "n2"}, {Name: "n3"}}
	statuses := []cluster.Answer[plan.Status]{{Node: nodes[0]}, {Node: nodes[1], Trouble: late}, {Node: nodes[2], Value: plan.Status{Services: []plan.ServiceStatus{{Namespace: "default", Name: "web", Port: "http", Protocol: "TCP"}}}}}
	kernels := []cluster.Answer[string]{{Node: nodes[0], Trouble: late}, {Node: nodes[1], Value: "+ip chain services\n"}, {Node: nodes[2]}}
	var out bytes.Buffer
	if err := printDrift(&out, byNode(drifts(api, statuses, kernels))); err != nil {
		t.Fatal(err)
	}
	want := `node n1: not all is known: timed out: not within 10s
  kproxy against the API server:
    +default/web:http/tcp
node n2: not all is known: timed out: not within 10s
  the kernel against what kproxy would program:
    +ip chain services
node n3: no difference
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
