// Package upstream compares what kproxy's plan lets clients reach with what the
// rules of Kubernetes' own kube-proxy do, both made from the same objects: upstream's
// iptables proxier is a library here, and writes into upstream's own model of iptables.
package upstream

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	sysctltest "k8s.io/component-helpers/node/util/sysctl/testing"
	"k8s.io/klog/v2"
	proxyconfig "k8s.io/kubernetes/pkg/proxy/apis/config"
	"k8s.io/kubernetes/pkg/proxy/iptables"
	proxyutil "k8s.io/kubernetes/pkg/proxy/util"
	iptablestest "k8s.io/kubernetes/pkg/util/iptables/testing"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source"
	"kproxy.dev/kproxy/test/kerneltest"
)

// world describes how both proxies run, and the node they are on.
type world struct {
	name          string
	pods          bool // pods are told by their networks
	masqueradeAll bool
	nodePorts     []string // networks that node ports are limited to
	zoneless      bool     // the node is in no zone
}

var worlds = []world{
	{name: "plain"},
	{name: "detector", pods: true},
	{name: "masquerade all", masqueradeAll: true},
	{name: "detector and masquerade all", pods: true, masqueradeAll: true},
	{name: "node port addresses", pods: true, nodePorts: []string{"10.1.0.0/16", "fd00:1::/64"}},
	{name: "no zone", zoneless: true},
}

var podNetworks = []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16"), netip.MustParsePrefix("fd00:2::/32")}

// addresses are this node's own, sorted.
func (w *world) addresses() []netip.Addr {
	return []netip.Addr{
		netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd00:1::1"), netip.MustParseAddr("fd00:9::1"),
	}
}

func parseAddr(s string) (netip.Addr, error) { return source.ParseAddr(s) }

// together is how many services are in the rules at a time: each packet passes those of all.
const together = 25

// modes are kproxy's, on a host that can do everything.
var modes = []plan.Mode{plan.ModeUserspace, plan.ModeIPTables, plan.ModeIPVS, plan.ModeAuto}

// TestUpstream compares random services in every world and mode. A thousand are so many that
// every exception occurs.
func TestUpstream(t *testing.T) {
	inNamespace(t)
	seed, count := number(t, "KPROXY_SEED", uint64(time.Now().UnixNano())), int(number(t, "KPROXY_SERVICES", 1000))
	t.Logf("the same services again: KPROXY_SEED=%d KPROXY_SERVICES=%d", seed, count)
	r := &random{Rand: rand.New(rand.NewPCG(seed, 0))}
	seen := make([]int, len(exceptions))
	tried, n := 0, 0
	for n < count && !t.Failed() {
		w := &worlds[n/together%len(worlds)]
		r.objects, r.nodePorts = objects{}, 0
		for range together {
			n++
			r.add(n)
		}
		tried += w.compare(t, &r.objects, seen)
	}
	t.Logf("%d connections to %d services compared in %d modes", tried, n, len(modes))
	for i, e := range exceptions {
		if t.Logf("%d exceptions: %s (%s)", seen[i], e.name, e.reason); seen[i] == 0 && !t.Failed() && count >= 1000 {
			t.Errorf("exception %q doesn't occur any more: delete it", e.name)
		}
	}
}

// number returns the number in a variable of the environment, or that called otherwise if the variable is empty.
func number(t *testing.T, name string, otherwise uint64) uint64 {
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

// compare tries every flow to o's Services and returns how many. It counts the
// exceptions that it meets.
func (w *world) compare(t *testing.T, o *objects, seen []int) int {
	t.Helper()
	tracers, plans := w.upstream(t, o), w.plans(o)
	tried, wrong := 0, 0
	for _, s := range o.services {
		for _, f := range w.flows(s) {
			want := tracers[f.family].trace(f.packet(w))
			for _, p := range plans {
				tried++
				got := f.decided(p)
				if slices.Equal(got, want) {
					continue
				}
				if at := exceptionFor(&f, p.Plan, got, want); at >= 0 {
					seen[at]++
					continue
				}
				t.Errorf("%s, mode %s: %s (-upstream +kproxy):\n%s", w.name, p.Policy.Mode, &f, cmp.Diff(want, got))
				if wrong++; wrong == 10 {
					t.Log("there may be more")
					return tried
				}
				break // the other modes hardly decide better
			}
		}
	}
	return tried
}

// plans are kproxy's decisions in each mode.
func (w *world) plans(o *objects) []*decisions {
	snapshot := source.Build(source.Objects{Services: o.services, EndpointSlices: o.slices, Nodes: []*corev1.Node{w.node()}}, thisNode)
	in := plan.Inputs{Snapshot: snapshot, Policy: plan.DefaultPolicy()}
	in.Policy.MasqueradeAll, in.Policy.NodeAddresses = w.masqueradeAll, w.addresses()
	in.Caps.Planes = kerneltest.Planes(plan.IPVS, plan.IPTables)
	for _, n := range w.nodePorts {
		in.Policy.NodePortNetworks = append(in.Policy.NodePortNetworks, netip.MustParsePrefix(n))
	}
	if w.pods {
		in.Policy.PodCIDRs = podNetworks
	}
	var out []*decisions
	for _, mode := range modes {
		in.Policy.Mode = mode
		p, _ := plan.Compute(nil, in)
		out = append(out, decisionsOf(p))
	}
	return out
}

func (w *world) node() *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode, Labels: w.labels()}}
	for _, a := range []string{"10.1.0.1", "fd00:1::1"} {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// labels are the node's that say where it is.
func (w *world) labels() map[string]string {
	if w.zoneless {
		return nil
	}
	return map[string]string{corev1.LabelTopologyZone: thisZone}
}

// upstream has the proxiers of both families write their rules.
func (w *world) upstream(t *testing.T, o *objects) (out [2]*tracer) {
	t.Helper()
	on, bit := true, int32(14)
	cfg := &proxyconfig.KubeProxyConfiguration{
		SyncPeriod: metav1.Duration{Duration: time.Hour}, MinSyncPeriod: metav1.Duration{Duration: time.Second}, NodePortAddresses: w.nodePorts,
		IPTables: proxyconfig.KubeProxyIPTablesConfiguration{LocalhostNodePorts: &on, MasqueradeBit: &bit},
		Linux:    proxyconfig.KubeProxyLinuxConfiguration{MasqueradeAll: w.masqueradeAll},
	}
	for _, f := range service.Families {
		family, fake := corev1.IPv4Protocol, iptablestest.NewFake()
		if f == service.IPv6 {
			family, fake = corev1.IPv6Protocol, iptablestest.NewIPv6Fake()
		}
		detector := proxyutil.NewNoOpLocalDetector()
		if w.pods {
			detector = proxyutil.NewDetectLocalByCIDR(podNetworks[f].String())
		}
		nodeIP := net.ParseIP(w.node().Status.Addresses[f].Address)
		p, err := iptables.NewProxier(context.Background(), cfg, family, fake, sysctltest.NewFake(), detector, thisNode, nodeIP, nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		p.OnTopologyChange(w.labels())
		for _, s := range o.services {
			p.OnServiceAdd(s)
		}
		for _, s := range o.slices {
			p.OnEndpointSliceAdd(s)
		}
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced() // writes the rules before it returns
		out[f] = newTracer(t, fake.Dump)
	}
	return out
}

// inNamespace moves the test into a network namespace with this node's addresses:
// upstream's proxier looks up the host's, and cleans up the host's conntrack table.
func inNamespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: builds a network namespace")
	}
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{
		"link set lo up", "addr add 10.1.0.1/32 dev lo", "addr add 10.9.0.1/32 dev lo", "addr add fd00:1::1/128 dev lo", "addr add fd00:9::1/128 dev lo",
	} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", args, err, out)
		}
	}
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // it is told much that it doesn't like, on purpose
}

// exception is a difference between kproxy and upstream that stays, and why.
type exception struct {
	name, reason string
	// is reports whether a difference is this one.
	is func(f *flow, p *plan.Plan, kproxy, upstream outcome) bool
}

// exceptions are all that are known. One that doesn't occur any more fails the test.
var exceptions = []exception{
	{
		name:   "SCTP in mode userspace",
		reason: "userspace forwards TCP and UDP; without a kernel data plane nothing serves SCTP, and it is refused",
		is: func(f *flow, p *plan.Plan, kproxy, _ outcome) bool {
			return p.Policy.Mode == plan.ModeUserspace && f.protocol == service.SCTP && kproxy.is(reject)
		},
	},
	{
		name: "SCTP in mode ipvs with externalTrafficPolicy Local",
		reason: "IPVS can't choose endpoints by client, and userspace, which does it for TCP and UDP, has no SCTP: pods and the node itself reach " +
			"local endpoints only, as in upstream's ipvs mode",
		is: func(f *flow, p *plan.Plan, _, _ outcome) bool {
			return p.Policy.Mode == plan.ModeIPVS && f.protocol == service.SCTP && f.place != clusterIP &&
				f.service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && (f.client.node || isPod(f, p))
		},
	},
	{
		name:   "node ports on ::1",
		reason: "kproxy's answer on loopback addresses of both families; upstream's on those of IPv4, in its iptables mode only",
		is: func(f *flow, _ *plan.Plan, _, upstream outcome) bool {
			return f.place == localhost && f.family == service.IPv6 && (upstream.is(untouched) || upstream.is(drop))
		},
	},
	{
		name:   "clients outside of the source ranges of a load balancer without endpoints",
		reason: "kproxy drops them whatever the endpoints, as upstream's nftables mode does; upstream's iptables mode refuses them while there are none",
		is: func(f *flow, _ *plan.Plan, kproxy, upstream outcome) bool {
			return f.place == loadBalancer && len(f.service.Spec.LoadBalancerSourceRanges) > 0 && kproxy.is(drop) &&
				(upstream.is(reject) || f.client.node && upstream.is(untouched)) // the latter as in the next exception
		},
	},
	{
		name: "node ports at addresses that --nodeport-addresses leaves out, without endpoints to use",
		reason: "kproxy leaves the port to the host's own programs; upstream's iptables mode keeps everyone from it, " +
			"because what refuses and drops there asks for local addresses of any kind",
		is: func(f *flow, p *plan.Plan, kproxy, upstream outcome) bool {
			return (f.place == nodePort || f.place == localhost) && !p.Policy.AnswersNodePorts(f.address.Addr()) && kproxy.is(untouched) &&
				(upstream.is(reject) || upstream.is(drop))
		},
	},
	{
		name: "the node itself to an external address without endpoints",
		reason: "upstream's iptables mode has its rules for external addresses in FORWARD and INPUT only, so that the node's own connections " +
			"leave for where the address is routed; kproxy refuses them, as upstream's nftables mode does",
		is: func(f *flow, _ *plan.Plan, kproxy, upstream outcome) bool {
			return f.client.node && (f.place == externalIP || f.place == loadBalancer) && upstream.is(untouched) && kproxy.is(reject)
		},
	},
}

// exceptionFor returns the index of the exception that a difference is, or -1.
func exceptionFor(f *flow, p *plan.Plan, kproxy, upstream outcome) int {
	return slices.IndexFunc(exceptions, func(e exception) bool { return e.is(f, p, kproxy, upstream) })
}

// isPod reports whether kproxy takes the client for a pod.
func isPod(f *flow, p *plan.Plan) bool {
	return p.Policy.IsPod(plan.Client{Address: f.client.address[f.family], Node: f.client.node})
}
