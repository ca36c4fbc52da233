package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// harm describes what somebody else does to kproxy's state in the kernel, in both
// families at once. {chain} stands for the chain of the service that the kernel
// carries.
type harm struct {
	name  string
	lines []string
}

// damage is done in every mode.
var damage = []harm{
	{"the routing rule is deleted", []string{"ip -4 rule del priority 10249", "ip -6 rule del priority 10249"}},
	{"the routing table is flushed", []string{"ip -4 route flush table 10249", "ip -6 route flush table 10249"}},
	{"connections are forgotten", []string{"conntrack -F"}},
}

// damageOfIPTables is done where iptables and ipset lead to userspace.
var damageOfIPTables = []harm{
	{"nat is flushed", []string{"iptables -t nat -F", "ip6tables -t nat -F"}},
	{"the first chain is flushed", []string{"iptables -t nat -F KPROXY-SERVICES", "ip6tables -t nat -F KPROXY-SERVICES"}},
	{"the jumps are deleted", []string{"iptables -t nat -D PREROUTING 1", "ip6tables -t nat -D PREROUTING 1"}},
	{"mangle and filter chains are flushed", []string{"iptables -t mangle -F", "ip6tables -t mangle -F KPROXY-PREROUTING", "ip6tables -t filter -F KPROXY-FORWARD"}},
	{"the userspace set is flushed", []string{"ipset flush KPROXY-USER-4", "ipset flush KPROXY-USER-6"}},
	{"entries are deleted from the userspace set", []string{"ipset del KPROXY-USER-4 10.96.0.11,tcp:80", "ipset del KPROXY-USER-6 fd00:96::b,tcp:80"}},
	{"entries are added to the userspace set", []string{"ipset add KPROXY-USER-4 10.96.0.10,tcp:80", "ipset add KPROXY-USER-6 fd00:96::a,tcp:80"}},
	{"the endpoints' set is flushed", []string{"ipset flush KPROXY-ENDPOINT-4", "ipset flush KPROXY-ENDPOINT-6"}},
	{"the heartbeat's set is flushed", []string{"ipset flush KPROXY-ALIVE-4", "ipset flush KPROXY-ALIVE-6"}},
}

// damageOf is done where services are offloaded to a data plane.
var damageOf = map[plan.DataPlane][]harm{
	plan.NFTables: {
		{"the ruleset is flushed", []string{"nft flush ruleset"}},
		{"the tables are deleted", []string{"nft delete table ip kproxy", "nft delete table ip6 kproxy"}},
		{"the first chain is flushed", []string{"nft flush chain ip kproxy services", "nft flush chain ip6 kproxy services"}},
		{"a rule is added", []string{"nft insert rule ip kproxy services accept", "nft insert rule ip6 kproxy services ip6 daddr fd00:96::a drop"}},
		{"a chain of services is flushed", []string{"nft flush chain ip kproxy pick-3-affinity-1h", "nft flush chain ip6 kproxy pick-3-affinity-1h"}},
		{"chains are added", []string{"nft add chain ip kproxy others", "nft add chain ip6 kproxy others"}},
		{"masquerading is flushed", []string{"nft flush chain ip kproxy nat-postrouting", "nft flush chain ip6 kproxy nat-postrouting"}},
		{"the userspace set is flushed", []string{"nft flush set ip kproxy userspace", "nft flush set ip6 kproxy userspace"}},
		{"entries are deleted from the userspace set", []string{"nft delete element ip kproxy userspace { 10.96.0.11 . tcp . 80 }", "nft delete element ip6 kproxy userspace { fd00:96::b . tcp . 80 }"}},
		{"entries are added to the userspace set", []string{"nft add element ip kproxy userspace { 10.96.0.10 . tcp . 80 }", "nft add element ip6 kproxy userspace { fd00:96::a . tcp . 80 }"}},
		{"the map of services is flushed", []string{"nft flush map ip kproxy services", "nft flush map ip6 kproxy services"}},
		{"the map of endpoints is flushed", []string{"nft flush map ip kproxy backends", "nft flush map ip6 kproxy backends"}},
		{"the endpoints' set is flushed", []string{"nft flush set ip kproxy endpoints", "nft flush set ip6 kproxy endpoints"}},
		{"the heartbeat's set is flushed", []string{"nft flush set ip kproxy alive", "nft flush set ip6 kproxy alive"}},
	},
	plan.IPTables: {
		{"a rule of a service is deleted", []string{"iptables -t nat -D {chain} 2", "ip6tables -t nat -D {chain} 1"}},
		{"a service's chain gets a foreign rule", []string{"iptables -t nat -I {chain} -j RETURN", "ip6tables -t nat -A {chain} -j ACCEPT"}},
	},
	plan.IPVS: {
		{"the chains that lead to IPVS are flushed", []string{"iptables -t nat -F KPROXY-VIRTUAL", "ip6tables -t nat -F KPROXY-VIRTUAL"}},
		{"the dummy link is deleted", []string{"ip link del kproxy0"}},
		{"the dummy link is set down", []string{"ip link set kproxy0 down"}},
		{"addresses are deleted from the dummy link", []string{"ip -4 addr del 10.96.0.10/32 dev kproxy0", "ip -6 addr del fd00:96::a/128 dev kproxy0"}},
		{"virtual servers are deleted", []string{"ipvsadm -D -t 10.96.0.10:80", "ipvsadm -D -t [fd00:96::a]:80"}},
		{"all virtual servers are deleted", []string{"ipvsadm -C"}},
		{"real servers are deleted", []string{"ipvsadm -d -t 10.96.0.10:80 -r 10.2.0.2:9000", "ipvsadm -d -t [fd00:96::a]:80 -r [fd00:2::2]:9000"}},
		{"weights are changed", []string{"ipvsadm -e -t 10.96.0.10:80 -r 10.2.0.2:9000 -m -w 7", "ipvsadm -e -t [fd00:96::a]:80 -r [fd00:2::2]:9000 -m -w 0"}},
		{"schedulers are changed", []string{"ipvsadm -E -t 10.96.0.10:80 -s lc -p 60", "ipvsadm -E -t [fd00:96::a]:80 -s lc"}},
		{"the set of virtual servers is flushed", []string{"ipset flush KPROXY-VIRTUAL-4", "ipset flush KPROXY-VIRTUAL-6"}},
		{"the set of addresses is flushed", []string{"ipset flush KPROXY-VIP-4", "ipset flush KPROXY-VIP-6"}},
		{"the set of drains is destroyed", []string{"ipset destroy KPROXY-DRAIN-4", "ipset destroy KPROXY-DRAIN-6"}},
	},
}

// TestDamageIsRepaired: whatever a third party removes from the kernel, or adds
// to what is kproxy's, is as it was within seconds, without a restart, and both
// data planes serve both families.
func TestDamageIsRepaired(t *testing.T) {
	t.Parallel()
	variants, harms := []string{"nft", "legacy"}, slices.Concat(damageOfIPTables, damage, damageOf[kernelPlane])
	if kernelPlane == plan.NFTables {
		variants, harms = variants[:1], slices.Concat(damage, damageOf[kernelPlane])
	}
	for _, variant := range variants {
		t.Run(variant, func(t *testing.T) {
			w := newLoneWorld(t) // one after the other: as parallel tests of their own they would begin last, and they take longest
			if w.plane != plan.NFTables {
				w.holdsRules(variant)
			}
			inKernel, inUserspace := newManifest("web", 10, w.net.Backends...), newManifest("other", 11, w.net.Backends...)
			inKernel.Affinity = time.Hour // has chains and sets of its own
			w.must(inKernel.Write(w.manifests))
			w.must(inUserspace.Write(w.manifests))
			w.start()
			w.pin("web", "line", service.PreferKernel)
			w.pin("other", "line", service.PreferUserspace)
			w.settled()
			before := w.everything()
			for _, d := range harms {
				if variant == "legacy" && !strings.Contains(d.lines[0], "tables") {
					continue // the same whatever the variant
				}
				t.Run(d.name, func(t *testing.T) {
					for _, line := range d.lines {
						w.inflict(variant, line)
					}
					w.repaired(t, before)
					for i := range frontends(inKernel) {
						w.eventuallyCarries(t, frontends(inKernel)[i], w.plane)
						w.eventuallyCarries(t, frontends(inUserspace)[i], plan.Userspace)
					}
				})
			}
		})
	}
}

// holdsRules makes a variant of iptables the one that holds the node's rules,
// so that kproxy's belong there.
func (w *world) holdsRules(variant string) {
	w.Helper()
	for _, family := range []string{"iptables-", "ip6tables-"} {
		w.node(family+variant, "-A", "INPUT", "-p", "tcp", "--dport", "2222", "-j", "ACCEPT")
	}
}

// settled waits until kproxy has nothing more to do: its rules stay the same
// for longer than it takes to change them.
func (w *world) settled() {
	w.Helper()
	last, change, since := "", "", time.Now()
	w.eventually(20*time.Second, "the rules to settle", func() error {
		if now := w.everything(); now != last {
			last, change, since = now, difference(last, now), time.Now()
		}
		if quiet := time.Since(since); quiet < lasting(time.Second) {
			return fmt.Errorf("they changed %s ago:\n%s", quiet, change)
		}
		return nil
	})
}

// inflict runs a line of damage.
func (w *world) inflict(variant, line string) {
	w.Helper()
	words := strings.Fields(line)
	if strings.HasSuffix(words[0], "tables") {
		words[0] += "-" + variant
	}
	if i := slices.Index(words, "{chain}"); i >= 0 {
		words[i] = w.chainOf(words[0])
	}
	w.node(words[0], words[1:]...)
}

// chainOf is the chain of default/web:line in the rules of a program.
func (w *world) chainOf(program string) string {
	w.Helper()
	rules := w.node(program+"-save", "-t", "nat")
	m := regexp.MustCompile(`default/web:line.* -j (KPROXY-SVC-\S+)`).FindStringSubmatch(rules)
	if m == nil {
		w.Fatalf("default/web:line has no chain:\n%s", rules)
	}
	return m[1]
}

// repaired waits until everything is as it was. kproxy promises five seconds;
// a slow machine gets eight.
func (w *world) repaired(t *testing.T, before string) {
	t.Helper()
	start := time.Now()
	for {
		began := time.Now()
		now := w.everything()
		if now == before {
			return
		}
		if time.Since(start) > patience(8*time.Second) {
			t.Fatalf("not repaired after %s:\n%s", time.Since(start), difference(before, now))
		}
		time.Sleep(max(lasting(500*time.Millisecond), min(time.Since(began), time.Second))) // a dozen programs have run
	}
}

// eventuallyCarries waits until new connections to target are carried by plane;
// what is in the kernel may be right before the way to it is.
func (w *world) eventuallyCarries(t *testing.T, target netip.AddrPort, plane plan.DataPlane) {
	t.Helper()
	start := time.Now()
	for {
		err := w.carries(target, plane)
		if err == nil {
			return
		}
		if time.Since(start) > patience(8*time.Second) {
			t.Fatalf("a new connection to %s isn't carried by %s: %v", target, plane, err)
		}
		sleep(20 * time.Millisecond)
	}
}

// difference lists the lines that are in one text only.
func difference(want, got string) string {
	var b strings.Builder
	for _, side := range []struct{ sign, in, out string }{{"-", want, got}, {"+", got, want}} {
		other := map[string]bool{}
		for _, line := range strings.Split(side.out, "\n") {
			other[line] = true
		}
		for _, line := range strings.Split(side.in, "\n") {
			if !other[line] {
				b.WriteString(side.sign + line + "\n")
			}
		}
	}
	return b.String()
}

// TestIPTablesLegacyVariant: where the node's rules are legacy ones, kproxy's are, and
// every path works as with the nft variant.
func TestIPTablesLegacyVariant(t *testing.T) {
	w := newWorld(t)
	w.holdsRules("legacy")
	m := newManifest("web", 10, w.net.Backends...)
	m.Type = "NodePort"
	m.Ports[0].NodePort, m.Ports[1].NodePort = 30080, 30080
	m.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}
	w.must(m.Write(w.manifests))
	w.start()
	if c := w.capability("iptables"); !strings.Contains(c.Reason, "legacy") {
		t.Fatalf("kproxy works with %q, want legacy", c.Reason)
	}
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		w.pin("web", "datagram", plane)
		for _, p := range w.paths(m) {
			for _, network := range []string{"tcp", "udp"} {
				t.Run(fmt.Sprintf("%s/%s/%s %s", plane, network, p.name, p.target.Addr()), func(t *testing.T) {
					w.onPath(t, network, p)
				})
			}
		}
	}
	if nft := w.node("iptables-nft-save"); strings.Contains(nft, "KPROXY") {
		t.Errorf("kproxy has rules in the nft variant as well:\n%s", nft)
	}
}

// TestIPTablesNewlineInComment: lines of another program's comment that read as rules of kproxy's aren't taken for any: kproxy has
// nothing to repair, which it looks for every second or two, and trace reads on.
func TestIPTablesNewlineInComment(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	w.settled()
	before, err := w.metrics()
	w.must(err)
	w.node("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-d", "192.0.2.1", "-m", "comment", "--comment", "a\n-A KPROXY-SERVICES -j DROP\nCOMMIT", "-j", "ACCEPT")
	sleep(6 * time.Second)
	after, err := w.metrics()
	w.must(err)
	const repairs = `kproxy_repairs_total{object="rules"}`
	if n, ok := after[repairs]; !ok || n != before[repairs] {
		t.Errorf("%s was %g and is %g: nobody has changed kproxy's rules", repairs, before[repairs], n)
	}
	names(t, w.traced(trace.Request{Address: frontends(m)[0], From: w.net.Config.ClientAddresses(0)[0]}), trace.Forwarded)
	w.answered("tcp", frontends(m)[0])
}

// TestIPTablesHeldLock: another program holds the xtables lock for 10 seconds. A change
// of endpoints takes effect meanwhile, because the service is served in
// userspace until its rules can be written.
func TestIPTablesHeldLock(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(w.dir, "xtables.lock")
	w.env = []string{"XTABLES_LOCKFILE=" + path}
	w.holdsRules("legacy") // the nft variant has no lock
	var lock *os.File
	w.changesWithoutRules("lock", 10*time.Second, func() {
		var err error
		lock, err = os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		w.must(err)
		w.Cleanup(func() { lock.Close() })
		w.must(syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	}, func() { w.must(syscall.Flock(int(lock.Fd()), syscall.LOCK_UN)) })
}

// TestIPTablesRestoreThatFailsHalfWay: the rules of one family are written and those of
// the other refused, again and again. The change takes effect in both, and the
// kernel carries the service again as soon as the rules can be written.
func TestIPTablesRestoreThatFailsHalfWay(t *testing.T) {
	dir := t.TempDir()
	broken := filepath.Join(dir, "broken")
	// What iptables-restore says and returns when the kernel has no memory left.
	script := "#!/bin/sh\n[ ! -e " + broken + " ] || { cat >/dev/null; echo 'ip6tables-restore: line 7 failed: Cannot allocate memory.' >&2; exit 4; }\nPATH=${PATH#*:} exec ip6tables-nft-restore \"$@\"\n"
	w := newWorld(t)
	executable(w.T, filepath.Join(dir, "ip6tables-nft-restore"), strings.NewReader(script))
	w.env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
	w.changesWithoutRules("Cannot allocate memory", time.Second, func() { write(t, broken, "") }, func() { w.must(os.Remove(broken)) })
}

// changesWithoutRules removes an endpoint of an offloaded service while no rule can be
// written, for which the status gives the reason: from when it happens until, some time
// later, it is mended, the service is in userspace. No connection fails or reaches the endpoint.
func (w *world) changesWithoutRules(reason string, lasts time.Duration, happen, mend func()) {
	w.Helper()
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	tcp4, tcp6 := w.traffic("tcp", frontends(m)[0], 30), w.traffic("tcp", frontends(m)[1], 30)

	happen()
	since := time.Now()
	w.must(m.Without("b3").Write(w.manifests))
	w.await("web", "line", plan.Userspace, "")
	changed := time.Now()
	b3 := w.net.Backend("b3")
	time.Sleep(patience(300 * time.Millisecond)) // it accepts what the kernel has for it
	w.eventually(20*time.Second, "b3 to have answered whom it had", func() error {
		if n := b3.Active(); n > 0 {
			return fmt.Errorf("it has %d connections", n)
		}
		return nil
	})
	b3.Stop()
	w.eventually(20*time.Second, "the status to say why", func() error {
		if st, err := w.client.Status(w.ctx); err != nil || !strings.Contains(st.Sync.LastError, reason) {
			return fmt.Errorf("it says %q, %v", st.Sync.LastError, err)
		}
		return nil
	})
	sleep(time.Second)
	time.Sleep(time.Until(since.Add(lasts)))
	if s := w.service("web", "line"); s.DataPlane != plan.Userspace {
		w.Errorf("while its rules can't be written, it is in %s: %s", s.DataPlane, s.Reason)
	}
	mend()
	w.await("web", "line", plan.IPTables, plan.StatePinned)
	w.awaitBackends(m, "b1", "b2")
	for _, tr := range []*lab.Traffic{tcp4, tcp6} {
		all := tr.Stop()
		w.noneFailed("while rules couldn't be written, and after", all)
		if n := all.Since(changed).ByBackend()["b3"]; n > 0 {
			w.Errorf("%d new connections reached the removed endpoint after the change", n)
		}
	}
	if st, err := w.client.Status(w.ctx); err != nil || st.Sync.LastError != "" {
		w.Errorf("the status still says %q, %v", st.Sync.LastError, err)
	}
}
