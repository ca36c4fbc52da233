package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/source/file"
	"kproxy.dev/kproxy/web"
)

// recorded returns what the nodes of a cluster printed for kproxy status -o json: on n1 default/server was pinned to
// userspace, n2 hadn't seen a connection to default/kubernetes. A fourth node hangs.
func recorded(t *testing.T) []Answer[plan.Status] {
	t.Helper()
	var out []Answer[plan.Status]
	for _, name := range []string{"n1", "n2", "n3"} {
		text, err := os.ReadFile(filepath.Join("testdata", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		a := Answer[plan.Status]{Node: Node{Name: name, Pod: "kproxy-" + name}}
		if err := json.Unmarshal(text, &a.Value); err != nil {
			t.Fatal(err)
		}
		out = append(out, a)
	}
	return append(out, Answer[plan.Status]{Node: Node{Name: "n4", Pod: "kproxy-n4"}, Trouble: &Trouble{TimedOut, "not within 10s"}})
}

// service returns the report about a service port.
func (r *Report) service(t *testing.T, title string) *ServiceReport {
	t.Helper()
	for i := range r.Services {
		if r.Services[i].Title() == title {
			return &r.Services[i]
		}
	}
	t.Fatalf("the report has no %s", title)
	return nil
}

// differences returns the differences of a service port as text.
func (r *Report) differences(t *testing.T, title string) (out []string) {
	t.Helper()
	for _, d := range r.service(t, title).Differences {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s", d.Node, d.What, d.Why)))
	}
	return out
}

func TestMerge(t *testing.T) {
	answers := recorded(t)
	r := Merge(answers)
	if len(r.Nodes) != 4 || r.Nodes[3].State != TimedOut || r.Nodes[3].Error == "" || r.Nodes[0].State != "alive" {
		t.Errorf("nodes %+v, want all four, the last without an answer", r.Nodes)
	}
	want := []string{"n1 in userspace pinned to userspace by kproxy pin"}
	if diff := cmp.Diff(want, r.differences(t, "default/server")); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
	s := r.service(t, "default/server")
	var total uint64
	for _, a := range answers {
		for i := range a.Value.Services {
			if a.Value.Services[i].Name == "server" {
				total += a.Value.Services[i].Connections.Total
			}
		}
	}
	if s.Nodes != 3 || s.Endpoints != 3 || s.Up != 3 || s.Connections.Total != total || total == 0 || s.DataPlanes[plan.Userspace] != 1 {
		t.Errorf("%+v, want three nodes' sum, %d connections", s, total)
	}
}

// Each way in which a node may differ is said of it, and of no other.
func TestDifferences(t *testing.T) {
	down := func(e *plan.EndpointStatus) {
		e.Health, e.LastError, e.Since = "down", "connection refused", time.Unix(1e9, 0)
	}
	for name, tc := range map[string]struct {
		change func(answers []Answer[plan.Status], of func(node int) *plan.ServiceStatus)
		want   []string
	}{
		"nothing": {change: func([]Answer[plan.Status], func(int) *plan.ServiceStatus) {}},
		"a service is missing": {
			func(a []Answer[plan.Status], of func(int) *plan.ServiceStatus) { of(1).Name = "other" }, []string{"n2 doesn't have it"},
		},
		"an endpoint is missing": {
			func(_ []Answer[plan.Status], of func(int) *plan.ServiceStatus) { of(2).Endpoints = of(2).Endpoints[1:] }, []string{"n3 lacks endpoint 10.244.1.3:80"},
		},
		"an endpoint is there besides": {
			func(_ []Answer[plan.Status], of func(int) *plan.ServiceStatus) {
				of(1).Endpoints = of(1).Endpoints[1:]
				of(2).Endpoints = of(2).Endpoints[1:]
			}, []string{"n1 has endpoint 10.244.1.3:80 besides"},
		},
		"an endpoint is down for one": {
			func(_ []Answer[plan.Status], of func(int) *plan.ServiceStatus) { down(&of(1).Endpoints[0]) },
			[]string{"n2 finds endpoint 10.244.1.3:80 down connection refused"},
		},
		"an endpoint is down for all but one": {
			func(_ []Answer[plan.Status], of func(int) *plan.ServiceStatus) {
				down(&of(0).Endpoints[0])
				down(&of(1).Endpoints[0])
			}, []string{"n3 doesn't find endpoint 10.244.1.3:80 down"},
		},
		"an address": {
			func(_ []Answer[plan.Status], of func(int) *plan.ServiceStatus) { of(2).Addresses = nil }, []string{"n3 at []"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			answers := recorded(t)
			of := func(node int) *plan.ServiceStatus {
				for i := range answers[node].Value.Services {
					if s := &answers[node].Value.Services[i]; s.Name == "server" {
						return s
					}
				}
				t.Fatal("there is no default/server")
				return nil
			}
			of(0).DataPlane = of(1).DataPlane
			tc.change(answers, of)
			if diff := cmp.Diff(tc.want, Merge(answers).differences(t, "default/server")); diff != "" {
				t.Errorf("differences (-want +got):\n%s", diff)
			}
		})
	}
}

// Since when a node differs is in its last event about the service's data plane.
func TestDate(t *testing.T) {
	r := Merge(recorded(t))
	if !r.Undated()["n1"] {
		t.Fatalf("of %v it isn't asked since when they differ, want n1", r.Undated())
	}
	at := time.Unix(1e9, 0)
	r.Date(map[string][]plan.Event{
		"n1": {{Time: at, Kind: "dataplane", Service: "default/server"}, {Time: at.Add(-time.Hour), Kind: "dataplane", Service: "default/server"}, {Time: at.Add(time.Hour), Kind: "health", Service: "default/server"}},
		"n2": {{Time: at.Add(time.Minute), Kind: "dataplane", Service: "default/server"}},
	})
	if got := r.service(t, "default/server").Differences[0].Since; !got.Equal(at) {
		t.Errorf("since %s, want %s", got, at)
	}
}

func pod(name, node string, running, ready bool, waiting string) core.Pod {
	status := core.ContainerStatus{Name: container, Ready: ready}
	if running {
		status.State.Running = &core.ContainerStateRunning{}
	} else {
		status.State.Waiting = &core.ContainerStateWaiting{Reason: waiting}
	}
	return core.Pod{
		ObjectMeta: meta.ObjectMeta{Name: name}, Spec: core.PodSpec{NodeName: node, Containers: []core.Container{{Name: container, Args: []string{"--config=/c", "--proxy-mode=nftables", "--hostname-override=$(NODE_NAME)", "--supervise", "--conntrack-min=1"}}}},
		Status: core.PodStatus{Phase: core.PodPending, ContainerStatuses: []core.ContainerStatus{status}},
	}
}

func TestPodOfNode(t *testing.T) {
	leaving := pod("leaving", "n1", true, true, "")
	leaving.DeletionTimestamp = &meta.Time{}
	for name, tc := range map[string]struct {
		pods    []core.Pod
		pod     string
		trouble *Trouble
	}{
		"none":                 {[]core.Pod{pod("other", "n2", true, true, "")}, "", &Trouble{Absent, "no pod of kproxy in namespace proxies is on the node"}},
		"one":                  {[]core.Pod{pod("a", "n1", true, true, "")}, "a", nil},
		"one that takes over":  {[]core.Pod{pod("a", "n1", true, true, ""), pod("b", "n1", true, false, "")}, "a", nil},
		"one that has to go":   {[]core.Pod{leaving, pod("b", "n1", true, false, "")}, "b", nil},
		"an image that isn't":  {[]core.Pod{pod("a", "n1", false, false, "ImagePullBackOff")}, "a", &Trouble{Absent, "pod a doesn't run: ImagePullBackOff"}},
		"one that isn't ready": {[]core.Pod{pod("a", "n1", true, false, "")}, "a", nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := nodeWith("n1", "proxies", tc.pods)
			if n.Pod != tc.pod {
				t.Errorf("pod %q, want %q", n.Pod, tc.pod)
			}
			if diff := cmp.Diff(tc.trouble, n.Trouble); diff != "" {
				t.Errorf("trouble (-want +got):\n%s", diff)
			}
		})
	}
	n := nodeWith("n1", "proxies", []core.Pod{pod("a", "n1", true, true, "")})
	want := []string{"--node=n1", "--config=/c", "--mode=nftables"}
	named := func(name string) bool {
		return slices.Contains([]string{"config", "mode", "node", "masquerade-all", "cluster-cidr"}, name)
	}
	if diff := cmp.Diff(want, n.RenderFlags(named)); diff != "" {
		t.Errorf("flags of render (-want +got):\n%s", diff)
	}
	n.args = []string{"run", "--masquerade-all", "--cluster-cidr", "10.0.0.0/8", "--supervise", "--node", "$(NODE)", "--config", "$(C)"}
	if diff := cmp.Diff([]string{"--node=n1", "--masquerade-all", "--cluster-cidr=10.0.0.0/8"}, n.RenderFlags(named)); diff != "" {
		t.Errorf("flags in other forms (-want +got):\n%s", diff)
	}
}

// A node that hangs, whatever it does with its context, holds up no other one, and every node has an answer.
func TestAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Cluster{timeout: 10 * time.Second}
		var nodes []Node
		for i := range 3 * atOnce {
			nodes = append(nodes, Node{Name: fmt.Sprint(i)})
		}
		nodes[1].Trouble = &Trouble{Absent, "no pod"}
		never := make(chan struct{})
		began := time.Now()
		answers := Ask(t.Context(), c, nodes, func(_ context.Context, n Node) (string, error) {
			switch n.Name {
			case "0":
				<-never // as a dialer that knows no context
			case "1":
				t.Error("a node without a pod is asked")
			case "2":
				return "", web.ErrUnknown
			}
			return n.Name, nil
		})
		if took := time.Since(began); took != c.timeout {
			t.Errorf("it took %s, want the time-out of the one that hangs", took)
		}
		close(never)
		for i, want := range []State{TimedOut, Absent, Older} {
			if tr := answers[i].Trouble; tr == nil || tr.State != want {
				t.Errorf("node %d: %v, want %s", i, tr, want)
			}
		}
		for i, a := range answers[3:] {
			if a.Trouble != nil || a.Value != fmt.Sprint(i+3) {
				t.Errorf("node %d: %q, %v", i+3, a.Value, a.Trouble)
			}
		}
	})
}

func TestTrouble(t *testing.T) {
	denial := `pods "kproxy-x" is forbidden: User "u" cannot create resource "pods/portforward" in API group "" in the namespace "kube-system"`
	for name, tc := range map[string]struct {
		err   error
		state State
		text  string
	}{
		"a denial":                    {apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "kproxy-x", errors.New(`User "u" cannot list resource`)), Forbidden, "deploy/plugin"},
		"a denial as text":            {errors.New("unable to upgrade connection: " + denial), Forbidden, `cannot create resource "pods/portforward"`},
		"a time-out":                  {fmt.Errorf("ask: %w", context.DeadlineExceeded), TimedOut, "not within 10s"},
		"an older one":                {fmt.Errorf("ask: %w", web.ErrUnknown), Older, "older"},
		"nothing on that port":        {errors.New("dial tcp4 127.0.0.1:10249: connect: connection refused"), Failed, "metricsBindAddress"},
		"whatever else there may be ": {errors.New("no space\nleft"), Failed, "no space left"},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Cluster{timeout: 10 * time.Second}
			got := troubleOf(tc.err, c.timeout)
			if got.State != tc.state || !strings.Contains(got.Text, tc.text) {
				t.Errorf("%v, want %s with %q", got, tc.state, tc.text)
			}
		})
	}
}

// What a node lacks of the API's, and has besides.
func TestMissed(t *testing.T) {
	dir := t.TempDir()
	manifest := `{apiVersion: v1, kind: Service, metadata: {name: server, namespace: default}, spec: {clusterIP: 10.96.0.80, ports: [{port: 80}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: server-1, namespace: default, labels: {kubernetes.io/service-name: server}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [10.244.1.3]}, {addresses: [10.244.9.9]}]
`
	if err := os.WriteFile(filepath.Join(dir, "m.yaml"), []byte(manifest), 0o644); err != nil {
		t.Fatal(err)
	}
	snapshot, problems, err := file.Load([]string{dir}, "n1")
	if err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	st := recorded(t)[0].Value
	for _, s := range st.Services {
		if s.Name == "server" {
			st.Services = []plan.ServiceStatus{s, {Namespace: "default", Name: "gone", Protocol: "UDP"}}
		}
	}
	want := []string{
		"+default/server/tcp endpoint 10.244.9.9:80",
		"-default/gone/udp",
		"-default/server/tcp endpoint 10.244.2.2:80",
		"-default/server/tcp endpoint 10.244.3.3:80",
	}
	if diff := cmp.Diff(want, Missed(snapshot, &st)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// What a dead node can't say of itself, the others do.
func TestSilentNode(t *testing.T) {
	answers := recorded(t)
	silent := func(nodes ...string) (p plan.PassiveHealth) {
		for _, n := range nodes {
			p.Nodes = append(p.Nodes, health.SilentNode{Name: n, Silent: 2, Asked: 2})
		}
		return p
	}
	answers[0].Value.PassiveHealth, answers[1].Value.PassiveHealth = silent("n3", "n4"), silent("n4", "elsewhere")
	const by1, by2 = "1 of 3 kproxys eject its endpoints, which are silent to them", "2 of 3 kproxys eject its endpoints, which are silent to them"
	want := map[string]string{"n1": "", "n2": "", "n3": by1, "n4": by2}
	report, board := map[string]string{}, map[string]string{}
	for _, n := range Merge(answers).Nodes {
		report[n.Node] = strings.Join(n.Warnings, "; ")
	}
	b := boardOf(answers)
	d := b.settle()
	for _, n := range read[NodeList](t, b, "/api/v1/nodes").Rows {
		board[n.Node] = strings.Join(n.Warnings, "; ")
	}
	if diff := cmp.Diff(want, report); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, board); diff != "" {
		t.Errorf("board (-want +got):\n%s", diff)
	}
	if rows := read[NodeList](t, b, "/api/v1/nodes?state=problem").Rows; len(rows) != 1 || rows[0].Node != "n3" || d.ailing != 1 {
		t.Errorf("%d nodes answer with a problem, %+v; want n3, as n4 doesn't answer", d.ailing, rows)
	}
}
