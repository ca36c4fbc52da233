package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/plan"
)

func TestDescribe(t *testing.T) {
	proxy := eventful()
	proxy.status.Alive, proxy.status.Ready, proxy.status.NotReady = true, false, "the kernel's rules aren't written yet"
	web := &proxy.status.Services[0]
	web.Kernel, web.KernelReason, web.Degraded = plan.IPTables, "it has one endpoint", "no retries"
	web.Problems = []string{"web.yaml:3: port 81 has no endpoints", "web.yaml:9: weight 900 is too much"}
	web.Offloads, web.Recalls = 2, 1
	web.AffinitySeconds, web.ExternalPolicy = 10800, "Local"
	web.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}
	web.Connections = plan.Connections{Active: 1, Total: 12, Failed: 3, Retried: 4, BytesIn: 1536, BytesOut: 20}
	down := web.Endpoints[0]
	down.Health, down.LastError, down.Usable, down.Ready, down.Local, down.Weight = "down", "connect: connection refused", false, false, true, 5
	down.ActiveConnections, down.TotalConnections, down.Failures, down.BytesIn, down.BytesOut = 1, 2, 3, 4096, 5
	ending := down
	ending.Terminating, ending.LastError, ending.Since, ending.Node, ending.Health = true, "", time.Time{}, "", "unknown"
	ejected := web.Endpoints[0]
	ejected.Health, ejected.LastError, ejected.Usable, ejected.Ejected = "down", "ejected: silent to 4 probes, 12s, its node n3: 14 of 14 endpoints silent", false, &health.Ejection{}
	web.Endpoints = append(web.Endpoints, down, ending, ejected)
	dnsTCP := &proxy.status.Services[2]
	dnsTCP.Addresses, dnsTCP.Endpoints, dnsTCP.State, dnsTCP.Reason, dnsTCP.QualifiesInSeconds = nil, nil, plan.StateRejecting, "it has no endpoint", 0
	socket := proxy.serve(t)

	since := web.Endpoints[0].Since.Local().Format(time.DateTime)
	at := proxy.past[0].Time.Local().Format(time.DateTime)
	for name, want := range map[string]string{
		"default/web": `
kproxy test on n1, mode auto, alive, up 0s
not ready: the kernel's rules aren't written yet

Service:      default/web
Protocol:     TCP
Addresses:    10.96.0.20:80, [fd00::20]:80
Node port:    30080
Algorithm:    round-robin
Affinity:     ClientIP, 3h0m0s
Policies:     internal Cluster, external Local
Source IPs:   192.0.2.0/24 2001:db8::/32
Data plane:   userspace
State:        qualifying: its endpoints changed a moment ago (in 4s)
Fallback:     iptables: it has one endpoint; no retries
Moves:        2 offloads, 1 recalls
Problem:      web.yaml:3: port 81 has no endpoints
Problem:      web.yaml:9: weight 900 is too much
Connections:  1 active, 12 in all, 3 failed, 4 retried; 1.5KB in, 20B out
Open now:     1 connection, 1 in userspace; 0B in, 0B out
Endpoints:    1/4 in use
  ADDRESS        NODE  HEALTH   SINCE                WEIGHT  ACTIVE  TOTAL  FAILED  IN    OUT  STATE
  10.2.0.2:9000  n1    up       ` + since + `  1       0       0      0       0     0    in use
  10.2.0.2:9000  n1    down     ` + since + `  5       1       2      3       4.0K  5    not used, local, not ready; last error: connect: connection refused
  10.2.0.2:9000  -     unknown  -                    5       1       2      3       4.0K  5    not used, local, terminating, still serving
  10.2.0.2:9000  n1    down     ` + since + `  1       0       0      0       0     0    not used; ejected: silent to 4 probes, 12s, its node n3: 14 of 14 endpoints silent
Events:
  ` + at + `  dataplane  added, userspace: new
`,
		"kube-system/dns:dns-tcp": `
kproxy test on n1, mode auto, alive, up 0s
not ready: the kernel's rules aren't written yet

Service:      kube-system/dns:dns-tcp
Protocol:     TCP
Addresses:    none
Algorithm:    round-robin
Data plane:   userspace
State:        rejecting: it has no endpoint
Fallback:     none
Moves:        0 offloads, 0 recalls
Connections:  0 active, 0 in all, 0 failed, 0 retried; 0B in, 0B out
Open now:     no connections
Endpoints:    0/0 in use
Events:
  none
`,
	} {
		got := runLine(t, "describe", name, "--socket", socket)
		if d := cmp.Diff(want[1:], got.stdout); d != "" || got.status != 0 {
			t.Errorf("%s (-want +got):\n%s%s", name, d, got.err)
		}
	}
	both := runLine(t, "describe", "kube-system/dns", "--socket", socket)
	if n := strings.Count(both.stdout, "Service:"); n != 2 {
		t.Errorf("%d ports of a service of two:\n%s", n, both.stdout)
	}
	for line, want := range map[string]string{
		"": "describe takes a service, as NAMESPACE/NAME[:PORT]", "a/b c/d": "describe takes one service at most", "default/wbe": "there is no service default/wbe, did you mean default/web?",
	} {
		if got := runLine(t, append(strings.Fields("describe --socket "+socket), strings.Fields(line)...)...); !strings.HasPrefix(got.err, want) || got.stdout != "" {
			t.Errorf("describe %s: %+v, want %q", line, got, want)
		}
	}
}

// TestStatusOfEjected: a line of the table names an endpoint that is ejected, and the node's lines what it finds of nodes.
func TestStatusOfEjected(t *testing.T) {
	const cut, why = "this node seems to be cut off", "ejected: silent to 4 probes, 12s"
	st := eventful().status
	st.Warnings = []string{cut}
	e := &st.Services[0].Endpoints[0]
	e.Ejected, e.Health, e.LastError, e.Usable = &health.Ejection{}, "down", why, false
	for wide, want := range map[bool]string{false: e.Address.String() + " is " + why, true: "not used " + why} {
		var out strings.Builder
		if err := printStatus(&out, st, wide); err != nil || !strings.Contains(out.String(), want) || !strings.Contains(out.String(), cut) {
			t.Errorf("wide %v: %v, want %q and %q in\n%s", wide, err, want, cut, out.String())
		}
	}
}
