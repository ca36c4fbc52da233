package leftovers

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// saved are the sets of a host, as ipset saves them.
type saved map[string]string

func (s saved) read(name string) (kernel.AnySet, error) {
	text, ok := s[name]
	if !ok {
		return kernel.AnySet{}, kernel.ErrNotFound
	}
	out := kernel.AnySet{Name: name, Type: "hash:ip,port"}
	if !strings.Contains(text, ",") {
		out.Type = "bitmap:port"
	}
	for line := range strings.Lines(text) {
		if words := strings.Fields(line); words[0] == "add" {
			e, err := kernel.ParseEntry(kernel.SetType(out.Type), words[2])
			if err != nil {
				return out, err
			}
			out.Entries = append(out.Entries, e)
		}
	}
	return out, nil
}

// TestOwners: a virtual server is kube-proxy's if its sets name it, by a node port
// only at one of the node's own addresses of the same family.
func TestOwners(t *testing.T) {
	host := saved{
		"KUBE-CLUSTER-IP":             "create KUBE-CLUSTER-IP hash:ip,port family inet\nadd KUBE-CLUSTER-IP 10.96.0.10,tcp:53\nadd KUBE-CLUSTER-IP 10.96.0.20,tcp:443\n",
		"KUBE-EXTERNAL-IP":            "add KUBE-EXTERNAL-IP 192.0.2.1,tcp:80\n",
		"KUBE-NODE-PORT-TCP":          "add KUBE-NODE-PORT-TCP 30080\n",
		"KUBE-6-NODE-PORT-UDP":        "add KUBE-6-NODE-PORT-UDP 30053\n",
		"KUBE-NODE-PORT-SCTP-HASH":    "add KUBE-NODE-PORT-SCTP-HASH 192.0.2.1,sctp:30090\n",
		"KUBE-HEALTH-CHECK-NODE-PORT": "add KUBE-HEALTH-CHECK-NODE-PORT 32000\n",
		"KPROXY-VIRTUAL-4":            "add KPROXY-VIRTUAL-4 10.96.0.20,tcp:443\n",
	}
	var sets []string
	for name := range host {
		if baseOf(name) != "" {
			sets = append(sets, name)
		}
	}
	o := owners{
		link: set("10.96.0.10", "10.96.0.20", "fd00:96::10"),
		node: set("192.0.2.1", "127.0.0.1", "2001:db8::1"),
		sets: serviceSets(sets),
	}
	if err := o.readSets(host.read, sets); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		at            string
		proto         service.Protocol
		own, doubtful bool
	}{
		{"10.96.0.10:53", service.TCP, true, false},
		{"10.96.0.10:53", service.UDP, false, true}, // another protocol
		{"10.96.0.10:54", service.TCP, false, true},
		{"10.96.0.10:30080", service.TCP, false, true}, // no node port: on kube-ipvs0
		{"10.96.0.20:443", service.TCP, false, false},  // kproxy's
		{"[fd00:96::10]:53", service.TCP, true, false}, // no set of that family tells
		{"192.0.2.1:80", service.TCP, true, false},     // an external IP on the node
		{"192.0.2.1:30080", service.TCP, true, false},
		{"127.0.0.1:30080", service.TCP, true, false},
		{"192.0.2.1:30080", service.UDP, false, false},
		{"192.0.2.1:30081", service.TCP, false, false},
		{"192.0.2.1:30090", service.SCTP, true, false},
		{"127.0.0.1:30090", service.SCTP, false, false},
		{"192.0.2.1:32000", service.TCP, false, false},
		{"198.51.100.1:30080", service.TCP, false, false}, // somebody else's: not the node's address
		{"[2001:db8::1]:30053", service.UDP, true, false},
		{"[2001:db8::1]:30080", service.TCP, false, false}, // a node port of the other family
		{"192.0.2.1:30053", service.UDP, false, false},
	}
	for _, tt := range tests {
		own, doubtful := o.of(server{tt.proto, netip.MustParseAddrPort(tt.at)})
		if own != tt.own || doubtful != tt.doubtful {
			t.Errorf("%s/%s: kube-proxy's %v, doubtful %v; want %v, %v", tt.at, tt.proto, own, doubtful, tt.own, tt.doubtful)
		}
	}
}

// TestReadAddresses: the addresses of kube-ipvs0 are told from the node's own, which are
// those of all other links but kproxy's, also of those that are down.
func TestReadAddresses(t *testing.T) {
	kerneltest.Namespace(t)
	run := func(command string) {
		t.Helper()
		words := strings.Fields(command)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
	}
	for _, c := range []string{
		"ip link set lo up",
		"ip link add kube-ipvs0 type veth peer name " + kernel.DummyLink,
		"ip link add up0 type veth peer name down0",
		"ip link set up0 up",
		"ip address add 10.96.0.10/32 dev kube-ipvs0",
		"ip address add fd00:96::10/128 dev kube-ipvs0 nodad",
		"ip address add 10.96.0.20/32 dev " + kernel.DummyLink,
		"ip address add 192.0.2.1/24 dev up0",
		"ip address add 198.51.100.1/24 dev down0",
	} {
		run(c)
	}
	kubeProxys, kproxys, err := dummies()
	if err != nil || kubeProxys == 0 || kproxys == 0 {
		t.Fatalf("links %d and %d, %v", kubeProxys, kproxys, err)
	}
	var o owners
	if err := o.readAddresses(kubeProxys, kproxys); err != nil {
		t.Fatal(err)
	}
	byAddress := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	if diff := cmp.Diff(set("10.96.0.10", "fd00:96::10"), o.link, byAddress); diff != "" {
		t.Errorf("of kube-ipvs0 (-want +got):\n%s", diff)
	}
	for a := range o.node { // made by the kernel
		if a.IsLinkLocalUnicast() {
			delete(o.node, a)
		}
	}
	delete(o.node, netip.IPv6Loopback()) // none where IPv6 is off on loopback
	if diff := cmp.Diff(set("127.0.0.1", "192.0.2.1", "198.51.100.1"), o.node, byAddress); diff != "" {
		t.Errorf("the node's (-want +got):\n%s", diff)
	}
}

func set(addresses ...string) map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	for _, a := range addresses {
		out[netip.MustParseAddr(a)] = true
	}
	return out
}
