package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/kube"
)

// Snapshot reads what the API server has of Services now, by the rules that kproxy reads it by, as seen from a node.
func (c *Cluster) Snapshot(ctx context.Context, node string) (*service.Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	return kube.Read(ctx, kube.Config{Access: c.rest, Node: node, QPS: -1, UserAgent: "kubectl-kproxy"})
}

// Missed says in what the status of a node differs from what the API has: a line that begins with "+" for what the
// node lacks, with "-" for what it has besides, sorted. A change that is on its way shows as well.
func Missed(api *service.Snapshot, st *plan.Status) []string {
	have, want := map[string]bool{}, map[string]bool{}
	add := func(lines map[string]bool, k service.Key, endpoint netip.AddrPort) {
		lines[fmt.Sprintf("%s/%s", k, strings.ToLower(k.Protocol.String()))] = true
		if endpoint.IsValid() {
			lines[fmt.Sprintf("%s/%s endpoint %s", k, strings.ToLower(k.Protocol.String()), endpoint)] = true
		}
	}
	for port, endpoints := range api.All() {
		add(want, port.Key, netip.AddrPort{})
		for i := range endpoints {
			add(want, port.Key, endpoints[i].Address)
		}
	}
	for i := range st.Services {
		s := &st.Services[i]
		add(have, s.Key(), netip.AddrPort{})
		for j := range s.Endpoints {
			add(have, s.Key(), s.Endpoints[j].Address)
		}
	}
	var out []string
	for line := range want {
		if !have[line] {
			out = append(out, "+"+line)
		}
	}
	for line := range have {
		if !want[line] {
			out = append(out, "-"+line)
		}
	}
	slices.Sort(out)
	return out
}

// RenderFlags returns the flags that make `kproxy render` decide as the kproxy of a node does, taken from the arguments of
// its container; named reports whether render has a flag.
func (n Node) RenderFlags(named func(string) bool) []string {
	out := []string{"--node=" + n.Name}
	for i, arg := range n.args {
		name, value, ok := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !strings.HasPrefix(arg, "-") {
			continue // a command, or a value
		}
		if name == "proxy-mode" {
			name = "mode"
		}
		if !named(name) || name == "node" {
			continue
		}
		if next := i + 1; !ok && next < len(n.args) && !strings.HasPrefix(n.args[next], "-") {
			value, ok = n.args[next], true
		}
		switch {
		case strings.Contains(value, "$("):
		case ok:
			out = append(out, "--"+name+"="+value)
		default:
			out = append(out, "--"+name)
		}
	}
	return out
}
