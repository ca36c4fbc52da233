package e2e

import (
	"net/netip"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// foreignFault is what somebody else does to the node, that kproxy leaves alone.
type foreignFault struct {
	name        string
	plane       service.Preference // where the service is carried
	plant, lift []string
	fate        string        // of real packets; empty for some of each
	verdict     trace.Verdict // what trace says
	culprit     []string      // words of the culprit
	only        plan.DataPlane
}

var foreignFaults = []foreignFault{
	{
		name: "a rule drops in FORWARD", plane: service.PreferKernel, only: plan.IPTables,
		plant: []string{"iptables -I FORWARD 1 -d 10.2.0.0/16 -j DROP"}, lift: []string{"iptables -D FORWARD 1"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"-d 10.2.0.0/16", "rule 1 of chain FORWARD in table filter", "iptables -t filter -D FORWARD 1"},
	},
	{
		name: "a rule drops answers in FORWARD", plane: service.PreferKernel,
		plant: []string{"iptables -I FORWARD 1 -s 10.2.0.0/16 -j DROP"}, lift: []string{"iptables -D FORWARD 1"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"-s 10.2.0.0/16", "the answer of 10.2.0.", "rule 1 of chain FORWARD in table filter"},
	},
	{
		name: "a rule drops in raw PREROUTING", plane: service.PreferUserspace,
		plant: []string{"iptables -t raw -A PREROUTING -d 10.96.0.10 -j DROP"}, lift: []string{"iptables -t raw -F PREROUTING"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"chain PREROUTING in table raw"},
	},
	{
		name: "nftables drops in forward", plane: service.PreferKernel, only: plan.IPTables,
		plant: []string{"nft add table ip guard", "nft add chain ip guard fw {type filter hook forward priority 10; policy accept;}", "nft add rule ip guard fw tcp dport 9000 drop"},
		lift:  []string{"nft delete table ip guard"},
		fate:  isSilent, verdict: trace.Dropped, culprit: []string{"guard", "tcp dport 9000 drop", "nft -a list chain"},
	},
	{
		name: "a rule of routing leads answers past kproxy", plane: service.PreferUserspace,
		plant: []string{"ip rule add pref 5 fwmark 0x1000/0x1800 to 10.1.0.2 lookup main"}, lift: []string{"ip rule delete pref 5"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"don't reach kproxy", "10.1.0.2", "mark 0x1000", "ip rule"},
	},
	{
		name: "a policy drops in FORWARD", plane: service.PreferKernel, only: plan.IPTables,
		plant: []string{"iptables -P FORWARD DROP"}, lift: []string{"iptables -P FORWARD ACCEPT"},
		fate: isAnswered, verdict: trace.Forwarded, // kproxy accepts what is its own
	},
	{
		name: "a rule refuses in INPUT", plane: service.PreferUserspace,
		plant: []string{"iptables -I INPUT 1 -p tcp --dport 10244 -j REJECT"}, lift: []string{"iptables -D INPUT 1"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"--dport 10244", "rule 1 of chain INPUT in table filter"},
	},
	{
		name: "a rule drops kproxy's connections in OUTPUT", plane: service.PreferUserspace,
		plant: []string{"iptables -I OUTPUT 1 -p tcp --dport 9000 -j DROP"}, lift: []string{"iptables -D OUTPUT 1"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"--dport 9000", "rule 1 of chain OUTPUT in table filter"},
	},
	{
		name: "an endpoint's route is a blackhole", plane: service.PreferKernel,
		plant: []string{"ip route replace blackhole 10.2.0.2/32 metric 0"}, lift: []string{"ip route replace 10.2.0.2/32 dev b1 scope link metric 0"},
		verdict: trace.Forwarded, culprit: []string{"on the way to 10.2.0.2:9000", "no way to 10.2.0.2", "blackhole", "ip route get 10.2.0.2"},
	},
	{
		name: "strict reverse path filter, and another way back", plane: service.PreferKernel,
		plant: []string{"sysctl -qw net.ipv4.conf.client.rp_filter=1", "ip route add 10.1.0.2/32 dev b1"},
		lift:  []string{"sysctl -qw net.ipv4.conf.client.rp_filter=0", "ip route del 10.1.0.2/32 dev b1"},
		fate:  isSilent, verdict: trace.Dropped, culprit: []string{"reverse path filter", "comes in on client", "net.ipv4.conf.client.rp_filter = 1 (strict)", "=2"},
	},
}

// TestTraceNamesForeignFaults: whatever somebody else does to a packet's way, trace
// names it, and real packets fare as it says.
func TestTraceNamesForeignFaults(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	client, at := w.net.Config.ClientAddresses(0)[0], frontends(m)[0]
	w.ask(w.net.Client, "tcp", at)
	for _, f := range foreignFaults {
		if f.only != "" && f.only != w.plane {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			w.pin("web", "line", f.plane)
			names(t, w.traced(trace.Request{Address: at, From: client}), trace.Forwarded)
			for _, line := range f.plant {
				w.inflict("nft", line)
			}
			r := w.traced(trace.Request{Address: at, From: client})
			got := w.fate(client, at)
			for _, line := range f.lift {
				w.inflict("nft", line)
			}
			names(t, r, f.verdict, f.culprit...)
			if f.fate != "" && got != f.fate {
				t.Errorf("real packets: %s, want %s", got, f.fate)
			}
			w.answered("tcp", at)
		})
	}
}

// TestTraceNamesWhatTheServiceLacks: source ranges, traffic policies, endpoints
// that are dead, and none at all.
func TestTraceNamesWhatTheServiceLacks(t *testing.T) {
	w := newWorld(t)
	inside, outside := w.net.Config.ClientAddresses(0)[0], w.net.Config.ClientAddresses(1)[0]
	ranged := newManifest("ranged", 10, w.net.Backends...)
	ranged.Type, ranged.LoadBalancerIPs = "LoadBalancer", []netip.Addr{netip.MustParseAddr("192.0.2.11")}
	ranged.SourceRanges = []netip.Prefix{netip.PrefixFrom(inside, 32)}
	empty := newManifest("empty", 11)
	local := newManifest("local", 12, w.net.Backends...)
	local.Type, local.ExternalLocal, local.ExternalIPs = "NodePort", true, []netip.Addr{netip.MustParseAddr("192.0.2.12")}
	for i := range local.Endpoints {
		local.Endpoints[i].Node = "another"
	}
	for _, m := range []lab.Manifest{ranged, empty, local} {
		w.must(m.Write(w.manifests))
	}
	w.start("--health-check", "off")
	lb, none, ext := netip.MustParseAddrPort("192.0.2.11:80"), frontends(empty)[0], netip.MustParseAddrPort("192.0.2.12:80")
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		t.Run(string(plane), func(t *testing.T) {
			w.pin("ranged", "line", plane)
			for _, c := range []struct {
				at      netip.AddrPort
				from    netip.Addr
				fate    string
				verdict trace.Verdict
				culprit []string
			}{
				{lb, inside, isAnswered, trace.Forwarded, nil},
				{lb, outside, isSilent, trace.Dropped, []string{outside.String(), "source ranges", "default/ranged:line", "loadBalancerSourceRanges"}},
				{none, inside, isRefused, trace.Refused, []string{"default/empty:line", "has no endpoint", "no endpoints at all"}},
				{ext, inside, isSilent, trace.Dropped, []string{"default/local:line", "no endpoint on this node", "Local"}},
			} {
				names(t, w.traced(trace.Request{Address: c.at, From: c.from}), c.verdict, c.culprit...)
				if got := w.fate(c.from, c.at); got != c.fate {
					t.Errorf("real packets from %s to %s: %s, want %s", c.from, c.at, got, c.fate)
				}
			}
		})
	}
	w.Run("dead endpoint", func(t *testing.T) {
		w.net.Backends[0].Stop()
		r := w.traced(trace.Request{Address: frontends(ranged)[0], Probe: true})
		names(t, r, trace.Forwarded, "endpoint 10.2.0.2:9000 is dead", "refused", "look at the pod")
	})
}

// ownFault is what somebody does to kproxy's own objects while it is stopped.
type ownFault struct {
	name        string
	plane       service.Preference
	plant, lift []string
	verdict     trace.Verdict
	culprit     []string
	mismatch    []string
	fate        string
	unused      string // backend that gets nothing
	only        plan.DataPlane
}

var ownFaults = []ownFault{
	{
		name: "an entry is missing in the userspace set", plane: service.PreferUserspace,
		plant: []string{"ipset del KPROXY-USER-4 10.96.0.10,tcp:80"}, lift: []string{"ipset add KPROXY-USER-4 10.96.0.10,tcp:80"},
		verdict: trace.Forwarded, mismatch: []string{"entry 10.96.0.10,tcp:80 of set KPROXY-USER-4", "missing"}, fate: isAnswered,
	},
	{
		name: "an entry is in the userspace set that isn't to be there", plane: service.PreferKernel,
		plant: []string{"ipset add KPROXY-USER-4 10.96.0.10,tcp:80"}, lift: []string{"ipset del KPROXY-USER-4 10.96.0.10,tcp:80"},
		verdict: trace.Forwarded, mismatch: []string{"entry 10.96.0.10,tcp:80 of set KPROXY-USER-4", "not there"},
	},
	{
		name: "a DNAT rule is missing", plane: service.PreferKernel, only: plan.IPTables,
		plant: []string{"iptables -t nat -D {chain} 2"}, lift: []string{"iptables -t nat -I {chain} 2 -p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.3:9000"},
		verdict: trace.Forwarded, mismatch: []string{"10.2.0.3:9000", "there", "missing"}, fate: isAnswered, unused: "b2",
	},
	{
		name: "a DNAT rule leads elsewhere", plane: service.PreferKernel, only: plan.IPTables,
		plant:   []string{"iptables -t nat -R {chain} 2 -p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.2:9000"},
		lift:    []string{"iptables -t nat -R {chain} 2 -p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.3:9000"},
		verdict: trace.Forwarded, mismatch: []string{"10.2.0.3:9000", "there", "missing"}, fate: isAnswered, unused: "b2",
	},
	{
		name: "somebody else's rule is in a shared chain", plane: service.PreferKernel, only: plan.IPTables,
		plant: []string{"iptables -t nat -I KPROXY-SERVICES 1 -p tcp -m tcp --dport 9 -j RETURN"}, lift: []string{"iptables -t nat -D KPROXY-SERVICES 1"},
		verdict: trace.Forwarded, mismatch: []string{"--dport 9 -j RETURN", "chain KPROXY-SERVICES in table nat", "not there", "rule 1"}, fate: isAnswered,
	},
	{
		name: "forwarding is off", plane: service.PreferKernel, only: plan.IPTables,
		plant: []string{"sysctl -qw net.ipv4.ip_forward=0"}, lift: []string{"sysctl -qw net.ipv4.ip_forward=1"},
		verdict: trace.Dropped, culprit: []string{"doesn't forward", "net.ipv4.ip_forward", "sysctl -w"}, fate: isSilent,
	},
	{
		name: "forwarding is off, and answers don't come back", plane: service.PreferKernel, only: plan.IPVS,
		plant: []string{"sysctl -qw net.ipv4.ip_forward=0"}, lift: []string{"sysctl -qw net.ipv4.ip_forward=1"},
		verdict: trace.Dropped, culprit: []string{"doesn't forward", "answers don't come back", "net.ipv4.ip_forward"}, fate: isSilent,
	},
	{
		name: "a real server is missing", plane: service.PreferKernel, only: plan.IPVS,
		plant: []string{"ipvsadm -d -t 10.96.0.10:80 -r 10.2.0.3:9000"}, lift: []string{"ipvsadm -a -t 10.96.0.10:80 -r 10.2.0.3:9000 -m -w 1"},
		verdict: trace.Forwarded, mismatch: []string{"real server 10.2.0.3:9000", "weight 1", "missing"}, fate: isAnswered, unused: "b2",
	},
	{
		name: "a weight is another", plane: service.PreferKernel, only: plan.IPVS,
		plant: []string{"ipvsadm -e -t 10.96.0.10:80 -r 10.2.0.3:9000 -m -w 0"}, lift: []string{"ipvsadm -e -t 10.96.0.10:80 -r 10.2.0.3:9000 -m -w 1"},
		verdict: trace.Forwarded, mismatch: []string{"real server 10.2.0.3:9000", "weight 1", "weight 0"}, fate: isAnswered, unused: "b2",
	},
	{
		name: "the address isn't on the link", plane: service.PreferKernel, only: plan.IPVS,
		plant: []string{"ip addr del 10.96.0.10/32 dev kproxy0"}, lift: []string{"ip addr add 10.96.0.10/32 dev kproxy0"},
		verdict: trace.NotAService, culprit: []string{"address 10.96.0.10 on link kproxy0", "missing"}, fate: isSilent,
	},
	{
		name: "the virtual server is missing", plane: service.PreferKernel, only: plan.IPVS,
		plant:   []string{"ipvsadm -D -t 10.96.0.10:80"},
		verdict: trace.Refused, mismatch: []string{"virtual server tcp 10.96.0.10:80", "missing"}, fate: "",
	},
	{
		// The last one: kproxy repairs it when it goes on.
		name: "the jump is missing", plane: service.PreferKernel, only: plan.IPTables,
		plant:   []string{"iptables -t nat -D PREROUTING 1"},
		verdict: trace.NotAService, culprit: []string{"KPROXY-SERVICES", "chain PREROUTING in table nat", "missing"}, fate: isSilent,
	},
}

// TestTraceNamesDamage: where what is kproxy's own isn't as planned, trace says what.
// kproxy is stopped, or it would have repaired it.
func TestTraceNamesDamage(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off", "--alive-timeout", within(4*time.Minute).String())
	client, at := w.net.Config.ClientAddresses(0)[0], frontends(m)[0]
	w.ask(w.net.Client, "tcp", at)
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		w.pin("web", "datagram", plane)
		w.settled()
		var proxy *trace.Proxy
		w.must(w.net.Node.Do(func() (err error) {
			proxy, err = w.proxyOf(plane)
			return err
		}))
		w.must(w.proxy.Signal(syscall.SIGSTOP))
		if before := w.tracedStopped(proxy, trace.Request{Address: at, From: client}); len(before.Mismatches) > 0 {
			t.Fatalf("before: %q", before.Mismatches)
		}
		for _, f := range ownFaults {
			if f.plane != plane || f.only != "" && f.only != w.plane {
				continue
			}
			t.Run(f.name, func(t *testing.T) { w.damaged(t, proxy, f, client, at) })
		}
		w.must(w.proxy.Signal(syscall.SIGCONT))
	}
}

// damaged plants one fault, looks, and lifts it.
func (w *world) damaged(t *testing.T, proxy *trace.Proxy, f ownFault, client netip.Addr, at netip.AddrPort) {
	for _, line := range f.plant {
		w.inflict("nft", line)
	}
	r := w.tracedStopped(proxy, trace.Request{Address: at, From: client})
	var got string
	if f.fate != "" {
		got = w.fate(client, at)
	}
	if f.unused != "" {
		if all := w.backendsOf(w.net.Client, at, 12); all[f.unused] > 0 {
			t.Errorf("answered by %v, want nothing of %s", all, f.unused)
		}
		for _, c := range r.Candidates {
			if c.Endpoint.Addr() == w.net.Backend(f.unused).Addresses[0] && c.Probability > 0 {
				t.Errorf("%s has a probability of %v, and gets nothing", c.Endpoint, c.Probability)
			}
		}
	}
	for _, line := range f.lift {
		w.inflict("nft", line)
	}
	if f.culprit != nil || f.mismatch == nil {
		names(t, r, f.verdict, f.culprit...)
	} else if r.Verdict != f.verdict {
		t.Errorf("verdict %s, want %s\n%s", r.Verdict, f.verdict, r.Text(trace.Look{}))
	}
	if f.mismatch != nil {
		mismatched(t, r, f.mismatch...)
	}
	if got != f.fate {
		t.Errorf("real packets: %s, want %s", got, f.fate)
	}
}

// TestTraceOfADeadKproxy: with kproxy killed, trace says what the kernel does by
// itself, and what it doesn't.
func TestTraceOfADeadKproxy(t *testing.T) {
	for _, c := range []struct {
		mode    plan.Mode
		verdict string
		culprit string
		fate    string
	}{
		{plan.ModeUserspace, "NOT A SERVICE", "kproxy isn't running, and the kernel has no rules of its own for it", isSilent},
		{mode, "FORWARDED", "", isAnswered},
	} {
		t.Run(string(c.mode), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			w.must(m.Write(w.manifests))
			w.start("--mode", string(c.mode))
			at := frontends(m)[0]
			w.ask(w.net.Client, "tcp", at)
			w.must(w.proxy.Kill())
			w.eventually(10*time.Second, "the heartbeat to expire", func() error {
				return w.kproxyOnNode("ipset list KPROXY-ALIVE-4", "0.0.0.0/1", false)
			})
			client := w.net.Config.ClientAddresses(0)[0]
			out := w.node(binary, "trace", "--socket", filepath.Join(w.dir, "kproxy.sock"), "--from", client.String(), at.String())
			for _, want := range []string{"reading the kernel alone", c.verdict} {
				if !strings.Contains(out, want) {
					t.Errorf("the output doesn't say %q:\n%s", want, out)
				}
			}
			if flat := strings.Join(strings.Fields(out), " "); !strings.Contains(flat, c.culprit) {
				t.Errorf("the output doesn't say %q:\n%s", c.culprit, out)
			}
			if got := w.fate(client, at); got != c.fate {
				t.Errorf("real packets: %s, want %s", got, c.fate)
			}
		})
	}
}
