// Package fleet simulates the kproxys of a big cluster for the tests of what asks them all. Its nodes answer with what a
// real kproxy in a lab answered (testdata), multiplied by a deterministic generator: other names, addresses and counters for each
// service port, another state on some nodes. The answers go through the real client.
package fleet

import (
	"bufio"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"kproxy.dev/kproxy/cmd/kproxy/cluster"
	"kproxy.dev/kproxy/plan"
)

// recorded is what kproxy answered at /api/v1/status and /api/v1/connections: while all was well, and while a backend refused.
//
//go:embed testdata
var recorded embed.FS

// Fleet is a cluster. It is safe for concurrent use.
type Fleet struct {
	names       []string
	before      []byte // the status up to its service ports
	rows        [variants][][]byte
	connections []plan.ConnectionStatus
	asked       atomic.Uint64
	dialing     atomic.Int32 // connections to deaf nodes

	mu     sync.Mutex // faults change while nodes are asked
	faults map[string]Fault
	denied error // why nodes can't be listed
}

// Fault says what is wrong with a node.
type Fault int

// The faults.
const (
	None Fault = iota
	Absent
	Hung
	Forbidden
	Older
	Partitioned
	Deaf // a connection to it is never opened, nor given up: client-go's dialers know no context
	Slow // it lists its services, and its connections never
)

// Variants of a service port on a node.
const (
	kernel = iota
	userspace
	down    // an endpoint is
	lagging // has a former endpoint
	failing // connections fail, more with each answer; it ends before the number
	variants
)

// endpointsEach is how many endpoints a service port has.
const endpointsEach = 2

// New makes a fleet of so many nodes, node-0000 and up, and service ports, team-0/svc-0000:http and up.
func New(nodes, services int) (*Fleet, error) {
	f := &Fleet{faults: map[string]Fault{}}
	for i := range nodes {
		f.names = append(f.names, fmt.Sprintf("node-%04d", i))
	}
	var well, ill plan.Status
	var list struct{ Connections []plan.ConnectionStatus }
	if err := errors.Join(read("status.json", &well), read("down.json", &ill), read("connections.json", &list)); err != nil {
		return nil, err
	}
	f.connections = list.Connections
	row := func(st *plan.Status, port string) *plan.ServiceStatus {
		return &st.Services[slices.IndexFunc(st.Services, func(s plan.ServiceStatus) bool { return s.Port == port })]
	}
	templates := [variants]*plan.ServiceStatus{row(&well, "line"), row(&well, "http"), row(&ill, "line"), row(&well, "line"), row(&well, "line")}
	well.Services = nil
	text, err := json.Marshal(well)
	if err != nil {
		return nil, err
	}
	f.before = append([]byte(strings.TrimSuffix(string(text), `"services":null}`)), `"services":[`...)
	for v, template := range templates {
		for i := range services {
			text, err := json.Marshal(of(template, v, i, nodes))
			if err != nil {
				return nil, err
			}
			f.rows[v] = append(f.rows[v], text)
		}
	}
	return f, nil
}

func read(name string, into any) error {
	text, err := recorded.ReadFile("testdata/" + name)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// of is service port i, as a recorded one.
func of(template *plan.ServiceStatus, variant, i, nodes int) *plan.ServiceStatus {
	s := *template
	s.Namespace, s.Name, s.Port = fmt.Sprintf("team-%d", i%10), fmt.Sprintf("svc-%04d", i), "http"
	s.NodePort, s.Addresses = 0, []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)}
	s.Endpoints = slices.Clone(s.Endpoints[:endpointsEach])
	for e := range s.Endpoints {
		s.Endpoints[e].Address = endpointAddress(i, e)
		s.Endpoints[e].Node = fmt.Sprintf("node-%04d", (i+e*7)%nodes)
	}
	if variant == lagging {
		s.Endpoints[0].Address = endpointAddress(i, endpointsEach)
	}
	return &s
}

func endpointAddress(service, number int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(128 + number), byte(service >> 8), byte(service)}), 8080)
}

// Break makes a node have a fault.
func (f *Fleet) Break(node string, fault Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults[node] = fault
}

// Deny has nodes not be listed; nil ends that.
func (f *Fleet) Deny(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.denied = err
}

func (f *Fleet) fault(node string) Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.faults[node]
}

// Asked returns how many requests for a status nodes have answered or begun to answer.
func (f *Fleet) Asked() int { return int(f.asked.Load()) }

// Dialing returns how many connections to deaf nodes are being opened.
func (f *Fleet) Dialing() int { return int(f.dialing.Load()) }

// Nodes returns all nodes.
func (f *Fleet) Nodes(context.Context, []string) ([]cluster.Node, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []cluster.Node
	for _, name := range f.names {
		n := cluster.Node{Name: name, Pod: "kproxy-" + name}
		if f.faults[name] == Absent {
			n = cluster.Node{Name: name, Trouble: &cluster.Trouble{State: cluster.Absent, Text: "no pod of kproxy in namespace kube-system is on the node"}}
		}
		out = append(out, n)
	}
	return out, f.denied
}

// Dial connects to a node's kproxy.
func (f *Fleet) Dial(ctx context.Context, n cluster.Node) (net.Conn, error) {
	switch f.fault(n.Name) {
	case Forbidden:
		return nil, fmt.Errorf("pods %q is forbidden: User %q cannot create resource %q in API group %q in the namespace %q", n.Pod, "viewer", "pods/portforward", "", "kube-system")
	case Partitioned:
		<-ctx.Done() // the API server doesn't reach the node's kubelet
		return nil, ctx.Err()
	case Deaf:
		f.dialing.Add(1)
		select {}
	}
	near, far := net.Pipe()
	go func() {
		defer far.Close()
		_ = f.answer(far, n.Name) // fails when the client hangs up
	}()
	return near, nil
}

// answer answers a request as a node's kproxy does.
func (f *Fleet) answer(c net.Conn, node string) error {
	in := bufio.NewReader(c)
	r, err := http.ReadRequest(in)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(c, 64<<10)
	switch fault := f.fault(node); {
	case fault == Hung || fault == Slow && r.URL.Path == "/api/v1/connections":
		_, err = in.ReadByte() // until the client gives up
		return err
	case fault == Older:
		_, err = out.WriteString("HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
	default:
		_, _ = out.WriteString("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
		if r.URL.Path == "/api/v1/connections" {
			err = f.writeConnections(out, node)
		} else {
			err = f.writeStatus(out, node)
		}
	}
	return errors.Join(err, out.Flush())
}

// variant says how service port i is on node n: in the kernel on most; some nodes wait in userspace; two service
// ports have an endpoint down on every fifth node, one fails connections on one node; another node lags.
func variant(n, i int) int {
	switch {
	case i == 17 && n == 3:
		return failing
	case (i == 4 || i == 42) && n%5 == 0:
		return down
	case n == 8 && i%100 == 9:
		return lagging
	case (n+i)%7 == 0:
		return userspace
	}
	return kernel
}

func (f *Fleet) writeStatus(w *bufio.Writer, node string) error {
	asked := f.asked.Add(1)
	n := slices.Index(f.names, node)
	if _, err := w.Write(f.before); err != nil {
		return err
	}
	for i := range f.rows[kernel] {
		if n == 6 && i == 99 {
			continue // is missing there
		}
		if i > 0 {
			_ = w.WriteByte(',')
		}
		v := variant(n, i)
		text := f.rows[v][i]
		if v == failing {
			text = []byte(strings.Replace(string(text), `"failed":0`, fmt.Sprintf(`"failed":%d`, asked), 1))
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
	}
	_, err := w.WriteString("]}")
	return err
}

// writeConnections writes the recorded connections as those of other service ports: each third from outside, the others from
// endpoints of a service.
func (f *Fleet) writeConnections(w *bufio.Writer, node string) error {
	n, services := slices.Index(f.names, node), len(f.rows[kernel])
	list := slices.Clone(f.connections)
	for k := range list {
		from, to := (k*3)%min(services, 40), (k*k+n%3)%min(services, 60)
		list[k].Service = fmt.Sprintf("team-%d/svc-%04d:http", to%10, to)
		if k%3 > 0 {
			list[k].Client = netip.AddrPortFrom(endpointAddress(from, k%endpointsEach).Addr(), uint16(40000+k))
		}
	}
	return json.NewEncoder(w).Encode(map[string]any{"connections": list})
}
