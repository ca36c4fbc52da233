package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/cmd/kproxy/cluster"
)

// ask reads an answer of the dashboard of all nodes, and returns how many bytes it has.
func ask(t *testing.T, b *cluster.Board, path string, into any) int {
	t.Helper()
	w := httptest.NewRecorder()
	b.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%s: %d %s", path, w.Code, w.Body)
	}
	if err := json.Unmarshal(w.Body.Bytes(), into); err != nil {
		t.Fatal(err)
	}
	return w.Body.Len()
}

// start has a board ask a fleet until the test ends.
func start(t *testing.T, f *Fleet, timeout time.Duration) *cluster.Board {
	t.Helper()
	b := cluster.NewBoard(f, nil, timeout)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return b
}

// eventually waits until something is true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(12 * time.Minute); !f(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it didn't happen that %s", what)
		}
	}
}

// TestFaults: nodes that don't answer are listed with the reason, also those that do so only later, and a denied list is said
// first while what was known stays.
func TestFaults(t *testing.T) {
	f, err := New(12, 50)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]cluster.State{"node-0001": cluster.Forbidden, "node-0002": cluster.TimedOut, "node-0004": cluster.TimedOut, "node-0005": cluster.Absent, "node-0007": cluster.Older}
	for node, fault := range map[string]Fault{"node-0001": Forbidden, "node-0002": Hung, "node-0004": Deaf, "node-0005": Absent, "node-0007": Older, "node-0010": Slow} {
		f.Break(node, fault)
	}
	b := start(t, f, 2*time.Second)
	states := func() (n int, all bool) {
		var list cluster.NodeList
		ask(t, b, "/api/v1/nodes", &list)
		all = list.All == 12 && len(list.Rows) == 12
		for _, r := range list.Rows {
			if of := want[r.Node]; of != "" {
				all = all && r.State == of && r.Error != ""
				n++
			} else {
				all = all && r.State == "alive"
			}
		}
		return n, all
	}
	eventually(t, "each node has its state", func() bool { n, all := states(); return n == 5 && all })

	f.Break("node-0009", Partitioned)
	want["node-0009"] = cluster.TimedOut
	eventually(t, "a node that can't be reached any more is said to be silent, and when it answered last", func() bool {
		var list cluster.NodeList
		ask(t, b, "/api/v1/nodes?q=node-0009", &list)
		_, all := states()
		return all && !list.Rows[0].Answered.IsZero() && list.Rows[0].Services == 0 && list.Rows[0].Classes[cluster.Unknown] == 50
	})
	f.Break("node-0009", None)
	delete(want, "node-0009")
	eventually(t, "it is alive once it can be reached", func() bool { _, all := states(); return all })

	eventually(t, "a node whose connections take too long is alive without them, and what is broken comes first", func() bool {
		var flows cluster.FlowList
		ask(t, b, "/api/v1/flows", &flows)
		var list cluster.ServiceList
		ask(t, b, "/api/v1/services?limit=2", &list)
		return flows.Unknown == len(want)+1 && list.Rows[0].Key == "team-7/svc-0017:http/tcp" && list.Rows[1].Key == "team-2/svc-0042:http/tcp"
	})
	if n := f.Dialing(); n != 1 {
		t.Errorf("%d connections are being opened to one node, want 1", n)
	}

	f.Deny(errors.New(`list nodes: nodes is forbidden: User "viewer" cannot list resource "nodes"`))
	eventually(t, "the missing right is said first", func() bool {
		var s cluster.Summary
		ask(t, b, "/api/v1/summary", &s)
		return strings.Contains(s.Verdict[0].Text, `cannot list resource "nodes"`) && s.Nodes == 12
	})
}

// TestBounds: 500 nodes with 5,000 service ports each take less than 500 MB, the generator of their answers included, and no
// answer of the dashboard grows with the cluster. With KPROXY_FLEET=500 it has as many nodes, and takes a minute of processor
// time; else a tenth, of nodes and of memory over what the process takes without any.
func TestBounds(t *testing.T) {
	const services, program = 5000, 100e6
	nodes := 50
	if n := os.Getenv("KPROXY_FLEET"); n != "" {
		var err error
		if nodes, err = strconv.Atoi(n); err != nil {
			t.Fatalf("KPROXY_FLEET: %v, want how many nodes there are", err)
		}
	}
	most := uint64(program + 400e6/500*nodes)
	debug.SetMemoryLimit(int64(most) - 50e6) // as the Deployment's GOMEMLIMIT
	peak := peakMemory(t)
	f, err := New(nodes, services)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	b := start(t, f, time.Minute) // nothing hangs here, but the processors may be busy
	eventually(t, "all nodes have answered", func() bool {
		var s cluster.Summary
		var alive cluster.NodeList
		ask(t, b, "/api/v1/summary", &s)
		ask(t, b, "/api/v1/nodes?state=alive&limit=1", &alive)
		return alive.Total == nodes && s.Services == services
	})
	t.Logf("all nodes have answered after %s", time.Since(began).Round(time.Second))
	for path, bound := range map[string]int{
		"/api/v1/summary":                                       4 << 10,
		"/api/v1/services":                                      24 << 10,
		"/api/v1/services?limit=200":                            96 << 10,
		"/api/v1/grid?rows=70&columns=240":                      96 << 10,
		"/api/v1/grid?rows=256&columns=1024":                    640 << 10,
		"/api/v1/nodes":                                         32 << 10,
		"/api/v1/service?key=team-7/svc-0017:http/tcp":          24 << 10,
		"/api/v1/flows?limit=200":                               48 << 10,
		"/api/v1/services?class=failing&node=node-0003&limit=1": 4 << 10,
	} {
		asked := time.Now()
		var v map[string]any
		n := ask(t, b, path, &v)
		t.Logf("%s: %d bytes in %s", path, n, time.Since(asked).Round(time.Millisecond))
		if n > bound {
			t.Errorf("%s: %d bytes, want at most %d", path, n, bound)
		}
	}
	took := peak()
	t.Logf("%d MB at most", took/1e6)
	if took > most {
		t.Errorf("the process had %d bytes at most, want less than %d", took, most)
	}
}

// peakMemory returns a function that returns the most memory, in bytes, that the runtime has had of the system since: what a
// memory limit bounds, looked at each 10 ms. Unlike resident memory it is the same with the race detector, whose shadow
// memory is several times as much.
func peakMemory(t *testing.T) func() uint64 {
	ctx, cancel := context.WithCancel(t.Context())
	most := make(chan uint64, 1)
	go func() {
		var peak uint64
		had := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
		for ctx.Err() == nil {
			metrics.Read(had)
			peak = max(peak, had[0].Value.Uint64()-had[1].Value.Uint64())
			time.Sleep(10 * time.Millisecond)
		}
		most <- peak
	}()
	return func() uint64 {
		cancel()
		return <-most
	}
}
