package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
)

// TestNetworkPoliciesOnABridge: kube-router filters by source what the node sends to pods, where a
// stand-in's address means nothing to it. As long as it does, userspace connects from the node's address.
func TestNetworkPoliciesOnABridge(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/bridge"); err != nil {
		t.Skipf("needs the module br_netfilter, as nodes with such pods do: %v", err)
	}
	t.Parallel()
	w := buildWorld(t, func(l *lab.Config) { l.Topology = lab.Bridge })
	m := newManifest("web", 10, w.net.Backends[0])
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferUserspace)
	pod := w.net.Backends[1].Namespace
	sees := func(own bool) {
		for _, vip := range m.ClusterIPs {
			target := netip.AddrPortFrom(vip, 80)
			w.eventually(20*time.Second, fmt.Sprintf("%s to see the pod's own address: %v", target, own), func() error {
				a, err := pod.Ask(w.ctx, "tcp", target, "hello")
				if err == nil && w.addressOf(pod, a.Peer) != own {
					err = fmt.Errorf("the endpoint saw %s", a.Peer)
				}
				return err
			})
		}
	}
	sees(true)
	for _, line := range []string{
		"-N KUBE-ROUTER-OUTPUT", "-A KUBE-ROUTER-OUTPUT -p tcp --dport 9000 -m addrtype ! --src-type LOCAL -j REJECT", "-I OUTPUT -j KUBE-ROUTER-OUTPUT",
	} {
		w.node("sh", "-c", "iptables "+line+" && ip6tables "+line)
	}
	sees(false)
	w.node("sh", "-c", "for i in iptables ip6tables; do $i -D OUTPUT -j KUBE-ROUTER-OUTPUT && $i -F KUBE-ROUTER-OUTPUT && $i -X KUBE-ROUTER-OUTPUT; done")
	sees(true)
}
