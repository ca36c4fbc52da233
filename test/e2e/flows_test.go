package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/flows"
)

// TestFlows tries every flow of the flow matrix (test/flows/matrix.txtar) with real
// packets: who reaches which endpoints, who is refused or dropped, and which
// address an endpoint sees for the client; TCP, UDP and, where the kernel has it, SCTP, IPv4 and IPv6; first while
// all services are in userspace that can be, then when all are offloaded. On a slow machine only one configuration
// of the kernel's modes begins in userspace, whose rules are the same on every kernel.
func TestFlows(t *testing.T) {
	onFlowWorlds(t, func(w *flowWorld, mode plan.Mode, args []string) {
		w.configure(append(args, "--offload-after", "1h")...)
		if slow == 1 || mode == plan.ModeUserspace || w.configuration.Name == "plain" {
			w.startAgain()
			w.settled(plan.Userspace)
			w.tryOnHosts("in userspace")
			if mode == plan.ModeUserspace || w.Failed() {
				return
			}
			w.stop()
		}
		w.proxy.Args = append(w.proxy.Args, "--offload-after", "0s", "--offload-min-connections", "0")
		w.startAgain()
		w.settled(plan.IPTables, plan.IPVS, plan.NFTables)
		w.tryOnHosts("offloaded")
	})
}

// tryOnHosts tries the flows of all services on a host with nothing about it, and
// those of some on the other hosts of the configuration.
func (w *flowWorld) tryOnHosts(state string) {
	w.Helper()
	all := w.attempts()
	w.tryAll(state, all)
	some := slices.DeleteFunc(all, func(a attempt) bool { return !a.Service.OnEveryHost() })
	for _, h := range w.configuration.Hosts {
		if h == flows.Firewall && mode == plan.ModeNFTables {
			continue // no rule of nftables lifts the drop of another table's
		}
		w.onHost(h, func() { w.tryAll(fmt.Sprintf("%s, host %s", state, h), some) })
	}
}

// hostSettings are the commands that make the node a host of the matrix, and what
// makes it the host that it was. Host firewalls let in what a node asked for, its own
// traffic, and IPv6's neighbour discovery; the rule that checks sources of IPv6 is
// firewalld's.
var hostSettings = map[flows.Host][2]string{
	flows.Strict: {
		"sysctl -qw net.ipv4.conf.all.rp_filter=1; ip6tables -t mangle -A PREROUTING -m rpfilter --invert -j DROP",
		"sysctl -qw net.ipv4.conf.all.rp_filter=0; ip6tables -t mangle -D PREROUTING -m rpfilter --invert -j DROP",
	},
	flows.Marks: {
		"sysctl -qw net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.all.src_valid_mark=1; ip6tables -t mangle -A PREROUTING -m rpfilter --validmark --invert -j DROP",
		"sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.all.src_valid_mark=0; ip6tables -t mangle -D PREROUTING -m rpfilter --validmark --invert -j DROP",
	},
	flows.Firewall: {
		"for i in iptables ip6tables; do $i -P FORWARD DROP; $i -A INPUT -i lo -j ACCEPT; $i -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT; done; " +
			"ip6tables -A INPUT -p icmpv6 -j ACCEPT; iptables -P INPUT DROP; ip6tables -P INPUT DROP",
		"for i in iptables ip6tables; do $i -P INPUT ACCEPT; $i -P FORWARD ACCEPT; $i -D INPUT -i lo -j ACCEPT; $i -D INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT; done; " +
			"ip6tables -D INPUT -p icmpv6 -j ACCEPT",
	},
}

// onHost calls try while the node is such a host.
func (w *flowWorld) onHost(h flows.Host, try func()) {
	w.Helper()
	w.node("sh", "-ec", hostSettings[h][0])
	try()
	w.node("sh", "-ec", hostSettings[h][1])
}

// onFlowWorlds calls try for every mode and configuration of the flow matrix, with a
// world to start kproxy in and the arguments for it.
func onFlowWorlds(t *testing.T, try func(w *flowWorld, mode plan.Mode, args []string)) {
	t.Parallel()
	matrix, err := flows.Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range flowModes() {
		for _, c := range matrix.Configurations {
			t.Run(string(mode)+"/"+c.Name, func(t *testing.T) {
				t.Parallel()
				w := newFlowWorld(t, mode, matrix, c)
				try(w, mode, append([]string{
					"--mode", string(mode), "--health-check", "off",
					// Only userspace serves localhost, so a heartbeat that is late on a busy machine would show.
					"--alive-timeout", lasting(20 * time.Second).String(),
				}, c.Args(w.network, c.Topology.PodLink(w.pod().Name))...))
			})
		}
	}
}

// flowModes are the mode under test and, along with iptables, mode userspace: what
// that does depends on no data plane of the kernel's, so once is enough.
func flowModes() []plan.Mode {
	if mode == plan.ModeIPTables {
		return []plan.Mode{plan.ModeUserspace, mode}
	}
	return []plan.Mode{mode}
}

// flowWorld is a world with the services of one configuration of the matrix.
type flowWorld struct {
	*world
	mode          plan.Mode
	plane         plan.DataPlane // that all services are in, or but those that nobody serves
	configuration flows.Configuration
	network       *flows.Network
	flows         []flows.Flow
	// names are the endpoints by the backends' names.
	names map[string]string
	sctp  bool // there is SCTP, and the mode serves it
}

func newFlowWorld(t *testing.T, mode plan.Mode, matrix *flows.Matrix, c flows.Configuration) *flowWorld {
	t.Helper()
	if _, err := os.Stat("/proc/sys/net/bridge"); err != nil && c.Topology == lab.Bridge {
		t.Skipf("needs the module br_netfilter, as nodes with such pods do: %v", err)
	}
	// One backend for each endpoint, and one that is nothing but a pod.
	w := &flowWorld{
		world: buildWorld(t, func(l *lab.Config) { l.Backends, l.Topology = len(flows.EndpointNames)+1, c.Topology }),
		mode:  mode, configuration: c, names: map[string]string{},
	}
	w.network = &flows.Network{
		Endpoints: map[string][]netip.Addr{}, TargetPorts: [2]uint16{lab.LinePort, secondPort},
		Node: w.net.Config.NodeAddresses(), Outside: w.net.Config.ClientAddresses(0), Pods: []netip.Prefix{lab.PodCIDR4, lab.PodCIDR6},
	}
	for i, name := range flows.EndpointNames {
		w.network.Endpoints[name] = w.net.Backends[i].Addresses
		w.names[w.net.Backends[i].Name], w.names[second(w.net.Backends[i].Name)] = name, name
		w.serve(w.net.Backends[i].Namespace, second(w.net.Backends[i].Name), secondPort)
	}
	if w.sctp = lab.HasSCTP() == nil && mode != plan.ModeUserspace; w.sctp {
		for i := range flows.EndpointNames {
			b := w.net.Backends[i]
			w.serve(b.Namespace, b.Name, lab.LinePort, b.Addresses...)
		}
	}
	// Of many refusals at a time, each is to be told, so that one that isn't was dropped.
	w.node("sysctl", "-qw", "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0")
	var err error
	w.flows, err = matrix.Flows(c)
	w.must(err)
	w.flows = append(w.flows, matrix.ToNowhere()...)
	if slow > 1 {
		w.network.Annotations = map[string]string{"kproxy.dev/connect-timeout": within(time.Second).String()}
	}
	manifests, err := matrix.Manifests(c, w.network)
	w.must(err)
	w.must(os.WriteFile(filepath.Join(w.manifests, "flows.yaml"), manifests, 0o644))
	return w
}

// settled waits until each service that serves somebody is in one of the data planes,
// and the others in none or in one of them.
func (w *flowWorld) settled(planes ...plan.DataPlane) {
	w.Helper()
	serves, ports := map[string]bool{}, map[string]int{}
	want := 0
	for _, f := range w.flows {
		serves[f.Service.Name] = serves[f.Service.Name] || f.Want.Verdict == flows.Serve
		ports[f.Service.Name] = len(f.Service.Protocols()) * f.Service.Ports()
	}
	for _, n := range ports {
		want += n
	}
	w.eventually(30*time.Second, fmt.Sprintf("all services in %v", planes), func() error {
		// At first, services are in userspace before the rules that refuse and drop are there.
		if w.mode != plan.ModeUserspace && !strings.Contains(w.proxy.Log(), "programmed the kernel") {
			return errors.New("the kernel hasn't been programmed yet")
		}
		st, err := w.client.Status(w.ctx)
		if err != nil {
			return err
		}
		if len(st.Services) != want {
			return fmt.Errorf("%d service ports, want %d", len(st.Services), want)
		}
		for _, s := range st.Services {
			if !slices.Contains(planes, s.DataPlane) && s.Protocol != "SCTP" && (serves[s.Name] || s.DataPlane != plan.None) {
				return fmt.Errorf("%s:%s is in %s, %s: %s", s.Name, s.Port, s.DataPlane, s.State, s.Reason)
			}
		}
		w.plane = planes[0]
		return nil
	})
}

// attempt is a flow as one client tries it.
type attempt struct {
	*flows.Flow
	network string
	client  *lab.Namespace
	name    string // of the endpoint that the client is itself; empty if it is none
	target  netip.AddrPort
}

// pod is the backend that is nothing but a pod. The link to it on the node has its name.
func (w *flowWorld) pod() *lab.Backend { return w.net.Backends[len(w.net.Backends)-1] }

// attempts are all there are to make: pods that are endpoints try what pods try. A
// machine that is slow tries each flow by TCP or by UDP, in turns. SCTP is tried where the kernel has it.
func (w *flowWorld) attempts() (out []attempt) {
	for i := range w.flows {
		f := &w.flows[i]
		f.Want = f.In(w.mode)
		protocols := f.Service.Protocols()
		for n, protocol := range protocols {
			network := protocol.String()
			if protocol == service.SCTP && !w.sctp {
				continue
			}
			if slow > 1 && len(protocols) > 1 && (i/len(service.Families)+n+int(f.Family))%2 > 0 {
				continue
			}
			a := attempt{Flow: f, network: network}
			if f.Nowhere.IsValid() {
				a.target = f.Nowhere
			} else if f.Kind == flows.NodePort {
				a.target = netip.AddrPortFrom(w.network.Node[f.Family], f.Service.NodePort(f.Port))
			} else {
				a.target = netip.AddrPortFrom(f.Service.Address(f.Kind, f.Family), flows.ClusterPort(f.Port))
			}
			switch f.From {
			case flows.Pod:
				a.client = w.pod().Namespace
				// In by-bridge, only one pod is known to be one.
				if (w.configuration.Detector != flows.Bridge || w.configuration.Topology == lab.Bridge) && f.Service.Endpoints.Name == "everywhere" && f.Want.Verdict == flows.Serve {
					itself := a
					itself.client, itself.name = w.net.Backends[0].Namespace, w.names[w.net.Backends[0].Name]
					out = append(out, itself)
				}
			case flows.Node:
				a.client = w.net.Node
			case flows.Localhost:
				a.client = w.net.Node
				a.target = netip.AddrPortFrom(localhost[f.Family], a.target.Port())
			case flows.Outside:
				a.client = w.net.Client
			}
			out = append(out, a)
			if f.Kind == flows.NodePort && f.From != flows.Localhost && w.configuration.OwnNodePorts {
				left := *f
				left.Left, left.Want = true, flows.Outcome{Verdict: flows.Refuse}
				a.Flow, a.target = &left, netip.AddrPortFrom(w.net.Config.PodGateways()[f.Family], a.target.Port())
				out = append(out, a)
			}
		}
	}
	return out
}

var localhost = [2]netip.Addr{service.IPv4: netip.MustParseAddr("127.0.0.1"), service.IPv6: netip.IPv6Loopback()}
