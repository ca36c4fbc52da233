package leftovers_test

import (
	"net"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/kernel"
	own "kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/leftovers"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestLeftoverServers: the virtual servers that its sets name go, at kube-ipvs0's
// addresses and at node ports, with the link; others' stay, and so do kproxy's,
// even at the same address or with the same port.
func TestLeftoverServers(t *testing.T) {
	kerneltest.Namespace(t)
	h := host{t}
	if err := own.Load(); err != nil {
		t.Skipf("needs IPVS in the kernel: %v", err)
	}
	for _, name := range []string{"kube-ipvs0", "dummy7"} {
		if err := netlink.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			t.Skipf("needs dummy links in the kernel: %v", err)
		}
	}
	for address, link := range map[string]string{"10.96.0.10/32": "kube-ipvs0", "10.96.0.20/32": "kube-ipvs0", "fd00:96::10/128": "kube-ipvs0", "198.51.100.1/32": "dummy7"} {
		h.run("", "ip", "address", "add", address, "dev", link)
	}
	h.run(ipvsSets, "ipset", "restore")
	h.run(ipvsMode, "iptables-nft-restore", "--noflush")
	h.run("create KPROXY-VIRTUAL-4 hash:ip,port family inet\nadd KPROXY-VIRTUAL-4 10.96.0.20,tcp:443\n", "ipset", "restore")
	table, err := ipvs.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	add := func(address string, proto, port uint16) {
		t.Helper()
		s := &ipvs.Service{Address: net.ParseIP(address), Protocol: proto, Port: port, SchedName: "rr", AddressFamily: netlink.FAMILY_V6, Netmask: 128}
		if four := s.Address.To4(); four != nil {
			s.Address, s.AddressFamily, s.Netmask = four, netlink.FAMILY_V4, 0xffffffff
		}
		if err := table.NewService(s); err != nil {
			t.Fatalf("add virtual server %s:%d: %v", address, port, err)
		}
	}
	servers := func() (out []string) {
		t.Helper()
		all, err := table.GetServices()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			out = append(out, s.Address.String())
		}
		slices.Sort(out)
		return out
	}
	const tcp, udp = 6, 17
	add("10.96.0.10", tcp, 53)
	add("10.96.0.10", udp, 53) // no set names it
	add("10.96.0.20", tcp, 80)
	add("10.96.0.20", tcp, 443) // kproxy's
	add("fd00:96::10", tcp, 53)
	add("198.51.100.1", tcp, 30080) // a node port
	add("198.51.100.2", tcp, 80)    // somebody else's, as the next
	add("198.51.100.2", tcp, 30080)
	found, err := leftovers.Look(t.Context(), kernel.Exec{})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := found.String(), "11 chains of iptables-nft, the link kube-ipvs0, 4 virtual servers, 5 ipsets"; got != want {
		t.Errorf("found %s, want %s", got, want)
	}
	kept := []string{"the virtual server 10.96.0.10:53/udp stays, because none of kube-proxy's ipsets names it, though its address is on kube-ipvs0"}
	if diff := cmp.Diff(kept, found.Kept); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
	if err := leftovers.Remove(t.Context(), kernel.Exec{}, found); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"10.96.0.10", "10.96.0.20", "198.51.100.2", "198.51.100.2"}, servers()); diff != "" {
		t.Errorf("virtual servers left (-want +got):\n%s", diff)
	}
	if _, err := netlink.LinkByName("kube-ipvs0"); err == nil {
		t.Error("kube-ipvs0 is left")
	}
	if _, err := netlink.LinkByName("dummy7"); err != nil {
		t.Errorf("somebody else's link: %v", err)
	}
	if again, err := leftovers.Look(t.Context(), kernel.Exec{}); err != nil || !again.Empty() {
		t.Errorf("found again: %s, %v", again, err)
	}
}
