package trace

import (
	"math"
	"net/netip"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Rules that lead the service to two endpoints, and to userspace.
const (
	toEndpoints = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KPROXY-SVC-A - [0:0]
-A PREROUTING -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KPROXY-SVC-A
-A OUTPUT -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KPROXY-SVC-A
[7:420] -A KPROXY-SVC-A -p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.2:9000
[5:300] -A KPROXY-SVC-A -p tcp -j DNAT --to-destination 10.2.0.3:9000
COMMIT
`
	toUserspace = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KPROXY-PORTAL - [0:0]
-A PREROUTING -j KPROXY-PORTAL
-A OUTPUT -j KPROXY-PORTAL
-A KPROXY-PORTAL -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 10244
COMMIT
`
	transparent = `*mangle
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A PREROUTING -m connmark --mark 0x1000/0x1000 -j MARK --set-xmark 0x1000/0x1800
-A OUTPUT -m mark --mark 0x1800/0x1800 -j CONNMARK --set-xmark 0x1000/0x1000
COMMIT
`
	masquerades = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000
-A POSTROUTING -d 10.2.0.2/32 -j MASQUERADE
COMMIT
`
)

func filterRule(rule string) string {
	return "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n" + rule + "\nCOMMIT\n"
}

func TestFollow(t *testing.T) {
	tests := []struct {
		name    string
		from    string
		change  func(*scene)
		proxy   *Proxy
		verdict Verdict
		culprit []string // words; none for no culprit
		shares  map[string]float64
	}{
		{"to endpoints", "10.1.0.2", func(c *scene) { c.rules = toEndpoints }, nil, Forwarded, nil, map[string]float64{"10.2.0.2:9000": 0.5, "10.2.0.3:9000": 0.5}},
		{"from this node", "", func(c *scene) { c.rules = toEndpoints }, nil, Forwarded, nil, map[string]float64{"10.2.0.2:9000": 0.5, "10.2.0.3:9000": 0.5}},
		{"nothing is there", "10.1.0.2", func(c *scene) {}, nil, NotAService, nil, nil},
		{"nothing is there, planned", "10.1.0.2", func(c *scene) {}, forecasts(onePlan(plan.Userspace), ""), NotAService, []string{"nothing in the kernel leads"}, nil},
		{"no route to the address from here", "", func(c *scene) { c.rules = toEndpoints; c.routes["10.96.0.10"] = "" }, nil, Refused, []string{"no way to 10.96.0.10", "there is no route"}, nil},
		{"no route to an endpoint", "10.1.0.2", func(c *scene) { c.rules = toEndpoints; c.routes["10.2.0.3"] = "" }, nil, Forwarded, []string{"on the way to 10.2.0.3:9000 (50 % of new connections)", "there is no route"}, nil},
		{"no route to the client", "10.9.9.9", func(c *scene) { c.rules = toEndpoints }, nil, Dropped, []string{"no way to 10.9.9.9"}, nil},
		{"forwarding is off", "10.1.0.2", func(c *scene) { c.rules, c.off = toEndpoints, "net.ipv4.ip_forward" }, nil, Dropped, []string{"doesn't forward", "net.ipv4.ip_forward = 0", "sysctl -w net.ipv4.ip_forward=1"}, nil},
		{"the reverse path filter", "10.1.0.2", func(c *scene) {
			c.rules, c.filter = toEndpoints, reversePath{mode: 1, setting: "net.ipv4.conf.all.rp_filter", refused: true, back: route{link: "other"}}
		}, nil, Dropped, []string{"reverse path filter", "net.ipv4.conf.all.rp_filter = 1 (strict)"}, nil},
		{"the table is full", "10.1.0.2", func(c *scene) { c.rules, c.use = toEndpoints, [2]int{100, 100} }, nil, Dropped, []string{"conntrack", "100 of 100"}, nil},
		{"the table is almost full", "10.1.0.2", func(c *scene) { c.rules, c.use = toEndpoints, [2]int{95, 100} }, nil, Forwarded, nil, nil},
		{"dropped in FORWARD", "10.1.0.2", func(c *scene) { c.rules = toEndpoints + filterRule("-A FORWARD -d 10.2.0.3/32 -j DROP") }, nil, Forwarded, []string{"on the way to 10.2.0.3:9000", "rule 1 of chain FORWARD"}, nil},
		{"refused in FORWARD", "10.1.0.2", func(c *scene) { c.rules = toEndpoints + filterRule("-A FORWARD -j REJECT") }, nil, Refused, []string{"refuses the packet"}, nil},
		{"the hop limit is used up", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -s 10.1.0.2/32 -j TTL --ttl-set 1\nCOMMIT\n"
		}, nil, Refused, []string{"hop limit (TTL) is used up", "-j TTL --ttl-set 1", "rule 1 of chain PREROUTING in table mangle"}, nil},
		{"the hop limit of answers is used up", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -s 10.2.0.0/16 -j TTL --ttl-set 1\nCOMMIT\n"
		}, nil, Dropped, []string{"doesn't forward the answers of 10.2.0.", "hop limit (TTL) is used up", "rule 1 of chain PREROUTING in table mangle"}, nil},
		{"the hop limit is lowered", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j TTL --ttl-dec 62\nCOMMIT\n" + filterRule("-A FORWARD -m ttl --ttl-gt 1 -j DROP")
		}, nil, Forwarded, nil, nil},
		{"accepted before kproxy's rules", "10.1.0.2", func(c *scene) {
			c.rules = strings.Replace(toEndpoints, "-A PREROUTING", "-A PREROUTING -d 10.96.0.0/16 -j ACCEPT\n-A PREROUTING", 1)
		}, forecasts(onePlan(plan.IPTables), ""), NotAService, []string{"accepts the packet before kproxy's do", "-A PREROUTING -d 10.96.0.0/16 -j ACCEPT", "rule 1 of chain PREROUTING in table nat", "iptables -t nat -D PREROUTING 1"}, nil},
		{"a pod reaches itself", "10.2.0.2", func(c *scene) { c.rules = masquerades }, nil, Forwarded, nil, nil},
		{"a pod doesn't reach itself without masquerading", "10.2.0.2", func(c *scene) {
			c.rules = strings.Replace(masquerades, "-A POSTROUTING", "-A POSTROUTING -s 10.2.0.0/16 -j ACCEPT\n-A POSTROUTING", 1)
		}, nil, Dropped, []string{"the client is the endpoint itself", "isn't masqueraded", "-A POSTROUTING -s 10.2.0.0/16 -j ACCEPT", "rule 1 of chain POSTROUTING in table nat"}, nil},
		{"another source, of which it isn't known who has it", "10.1.0.2", func(c *scene) {
			c.rules = strings.Replace(masquerades, "-j MASQUERADE", "-j SNAT --to-source 192.0.2.9", 1)
		}, nil, Undetermined, []string{"come from 192.0.2.9, which isn't an address of this node", "rule 1 of chain POSTROUTING"}, nil},
		{"answers dropped", "10.1.0.2", func(c *scene) { c.rules = toEndpoints + filterRule("-A FORWARD -s 10.2.0.0/16 -j DROP") }, nil, Dropped, []string{"the answer of"}, nil},
		{"some answers dropped", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + filterRule("-A FORWARD -s 10.2.0.0/16 -m statistic --mode random --probability 0.2 -j DROP")
		}, nil, Forwarded, []string{"10 % of new connections", "the answer of"}, map[string]float64{"10.2.0.2:9000": 0.5, "10.2.0.3:9000": 0.5}},
		{"answers maybe dropped", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + filterRule("-A FORWARD -s 10.2.0.0/16 -m mystery --solved -j DROP")
		}, nil, Undetermined, nil, map[string]float64{"10.2.0.2:9000": 0.5, "10.2.0.3:9000": 0.5}},
		{"answers left to a program", "10.1.0.2", func(c *scene) { c.rules = toEndpoints + filterRule("-A FORWARD -s 10.2.0.0/16 -j NFQUEUE") }, nil, Undetermined, []string{"decides by itself", "NFQUEUE", "the answer of"}, nil},
		{"the answer to a SYN dropped", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + filterRule("-A FORWARD -p tcp -m tcp --tcp-flags SYN,ACK SYN,ACK -j DROP")
		}, nil, Dropped, []string{"the answer of"}, nil},
		{"answers aren't routed back", "10.1.0.2", func(c *scene) { c.rules, c.forgotten = toEndpoints, "10.1.0.2" }, nil, Dropped, []string{"the answers of 10.2.0.2 don't come back"}, nil},
		{"not tracked", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.96.0.10/32 -j CT --notrack\nCOMMIT\n"
		}, forecasts(onePlan(plan.IPTables), ""), NotAService, []string{"NOTRACK", "rule 1 of chain PREROUTING in table raw"}, nil},
		{"before conntrack", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -m conntrack --ctorigdst 10.96.0.10 -j DROP\nCOMMIT\n"
		}, nil, Forwarded, nil, nil},
		{"given to a socket that isn't there", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.96.0.10/32 -p tcp -j TPROXY --on-port 9 --on-ip 0.0.0.0 --tproxy-mark 0x1/0xffffffff\nCOMMIT\n"
		}, nil, Dropped, []string{"TPROXY", "nothing listens"}, nil},
		{"given to a socket", "10.1.0.2", func(c *scene) {
			c.listening = []string{"0.0.0.0:9"}
			c.rules = toEndpoints + "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.96.0.10/32 -p tcp -j TPROXY --on-port 9 --on-ip 0.0.0.0 --tproxy-mark 0x1/0xffffffff\nCOMMIT\n"
		}, nil, Undetermined, []string{"TPROXY"}, nil},
		{"userspace without a way", "10.1.0.2", func(c *scene) {
			c.rules, c.listening, c.routes["10.2.0.2"], c.routes["10.2.0.3"] = toUserspace, []string{"0.0.0.0:10244"}, "", ""
		}, forecasts(onePlan(plan.Userspace), "", 0.5, 0.5), Refused, []string{"no way to 10.2.0.2"}, nil},
		{"policy", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + strings.Replace(filterRule("-A FORWARD -s 203.0.113.0/24 -j ACCEPT"), ":FORWARD ACCEPT", ":FORWARD DROP", 1)
		}, nil, Dropped, []string{"policy of chain FORWARD", "iptables -t filter -A FORWARD -m conntrack --ctstate DNAT --ctorigdst 10.96.0.10 --ctorigdstport 80 -j ACCEPT"}, nil},
		{"a match that nobody knows", "10.1.0.2", func(c *scene) { c.rules = toEndpoints + filterRule("-A FORWARD -m mystery --solved -j DROP") }, nil, Undetermined, nil, nil},
		{"a match that nobody knows, and the same either way", "10.1.0.2", func(c *scene) { c.rules = toEndpoints + filterRule("-A FORWARD -m mystery --solved -j ACCEPT") }, nil, Forwarded, nil, nil},
		{"userspace", "10.1.0.2", func(c *scene) { c.rules, c.listening = toUserspace, []string{"0.0.0.0:10244"} }, forecasts(onePlan(plan.Userspace), "", 0.25, 0.75), Forwarded, nil,
			map[string]float64{"10.2.0.2:9000": 0.25, "10.2.0.3:9000": 0.75}},
		{"userspace, and answers to the client's address aren't marked", "10.1.0.2", func(c *scene) { c.rules, c.listening = toUserspace, []string{"0.0.0.0:10244"} },
			forecasts(onePlan(plan.Userspace), "10.1.0.2", 1), Dropped, []string{"don't reach kproxy", "10.1.0.2", "KPROXY-PREROUTING"}, nil},
		{"userspace, and answers to the client's address are untracked", "10.1.0.2", func(c *scene) {
			c.rules, c.listening = toUserspace+"*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -s 10.2.0.0/16 -j CT --notrack\nCOMMIT\n"+
				"*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -m conntrack --ctstate UNTRACKED -m socket --transparent -j MARK --set-xmark 0x1000/0x1800\nCOMMIT\n", []string{"0.0.0.0:10244"}
		}, forecasts(onePlan(plan.Userspace), "10.1.0.2", 1), Forwarded, nil, nil},
		{"userspace is dead", "10.1.0.2", func(c *scene) { c.rules = toUserspace }, forecasts(onePlan(plan.Userspace), "", 1), Refused, []string{"nothing listens", "10244"}, nil},
		{"userspace has nobody", "10.1.0.2", func(c *scene) { c.rules, c.listening = toUserspace, []string{"0.0.0.0:10244"} }, forecasts(onePlan(plan.Userspace), ""), Refused, []string{"no endpoint that takes connections"}, nil},
		{"userspace, and OUTPUT drops", "10.1.0.2", func(c *scene) {
			c.rules, c.listening = toUserspace+filterRule("-A OUTPUT -p tcp -m tcp --dport 9000 -j DROP"), []string{"0.0.0.0:10244"}
		}, forecasts(onePlan(plan.Userspace), "", 0.5, 0.5), Dropped, []string{"chain OUTPUT", "kproxy gives up after a while, and resets the client's connection"}, nil},
		{"an endpoint on this node", "10.1.0.2", func(c *scene) {
			c.rules, c.listening, c.local = toEndpoints, []string{"0.0.0.0:9000"}, append(c.local, "10.2.0.3")
		}, nil, Forwarded, nil, map[string]float64{"10.2.0.2:9000": 0.5, "10.2.0.3:9000": 0.5}},
		{"an endpoint on this node whose answers are dropped", "10.1.0.2", func(c *scene) {
			c.rules = toEndpoints + filterRule("-A OUTPUT -p tcp -m tcp --sport 9000 -j DROP")
			c.listening, c.local = []string{"0.0.0.0:9000"}, append(c.local, "10.2.0.2", "10.2.0.3")
		}, nil, Dropped, []string{"rule 1 of chain OUTPUT", "the answer of 10.2.0.2:9000"}, map[string]float64{"10.2.0.2:9000": 0.5, "10.2.0.3:9000": 0.5}},
		{"userspace that can't be asked", "10.1.0.2", func(c *scene) { c.rules, c.listening = toUserspace, []string{"0.0.0.0:10244"} }, nil, Undetermined, nil, nil},
		{"from a martian", "127.0.0.5", func(c *scene) { c.rules = toEndpoints }, nil, Forwarded, nil, nil}, // that is this node itself
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := usual()
			tt.change(&c)
			r := c.trace(t, tt.from, "10.96.0.10:80", tt.proxy)
			if r.Verdict != tt.verdict {
				t.Errorf("verdict %q, want %q", r.Verdict, tt.verdict)
			}
			for _, word := range tt.culprit {
				if !strings.Contains(r.Culprit, word) {
					t.Errorf("culprit %q doesn't say %q", r.Culprit, word)
				}
			}
			if len(tt.culprit) == 0 && r.Culprit != "" {
				t.Errorf("culprit %q, want none", r.Culprit)
			}
			got := map[string]float64{}
			for _, c := range r.Candidates {
				got[c.Endpoint.String()] = c.Probability
			}
			for e, want := range tt.shares {
				if math.Abs(got[e]-want) > 1e-9 {
					t.Errorf("%s has a probability of %v, want %v", e, got[e], want)
				}
			}
			if t.Failed() {
				t.Log(r.Text(Look{}))
			}
		})
	}
}

// TestOtherPortsOfTheAddress: of an address with services at other ports, the trace says which.
func TestOtherPortsOfTheAddress(t *testing.T) {
	c := usual()
	for to, want := range map[string]string{
		"10.96.0.10:81": "no service has port 81/tcp at 10.96.0.10; there are 80/tcp (default/web)",
		"10.96.0.11:80": "",
	} {
		got := ""
		for _, f := range c.trace(t, "10.1.0.2", to, forecasts(onePlan(plan.Userspace), "")).Findings {
			if f.Severity == SeverityNote {
				got += f.What
			}
		}
		if got != want {
			t.Errorf("%s: note %q, want %q", to, got, want)
		}
	}
}

// TestHungProxy: what a kproxy does that runs and doesn't answer isn't known, and it is named.
func TestHungProxy(t *testing.T) {
	c := usual()
	c.rules, c.listening = toUserspace, []string{"0.0.0.0:10244"}
	x := newTracer(Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, From: netip.MustParseAddr("10.1.0.2")}, nil, c.host(t))
	x.silent = "no answer within 10s"
	x.follow()
	x.compare()
	if r := x.result(); r.Verdict != Undetermined || !strings.Contains(r.Culprit, "kproxy hangs") || !strings.Contains(r.Culprit, "restart it") {
		t.Errorf("%s, culprit %q", r.Verdict, r.Culprit)
	}
}

func TestMasquerade(t *testing.T) {
	c := usual()
	c.rules = masquerades
	if m := c.trace(t, "10.1.0.2", "10.96.0.10:80", nil).Masquerade; !m.Yes || m.Source.String() != "10.2.0.1" || !strings.Contains(m.Reason, "rule 1 of chain POSTROUTING") {
		t.Errorf("masquerade = %+v", m)
	}
	c = usual()
	c.rules, c.listening = transparent+toUserspace, []string{"0.0.0.0:10244"}
	if m := c.trace(t, "10.1.0.2", "10.96.0.10:80", forecasts(onePlan(plan.Userspace), "10.1.0.2", 1)).Masquerade; m.Yes || m.Source.String() != "10.1.0.2" {
		t.Errorf("transparent: masquerade = %+v", m)
	}
	if m := c.trace(t, "10.1.0.2", "10.96.0.10:80", forecasts(onePlan(plan.Userspace), "", 1)).Masquerade; !m.Yes || m.Source.String() != "10.1.0.1" {
		t.Errorf("from the node's address: masquerade = %+v", m)
	}
}

func TestBalancers(t *testing.T) {
	for _, tt := range []struct {
		name    string
		shares  [2]float64
		weights [2]uint32
		verdict Verdict
	}{
		{"by shares", [2]float64{0.25, 0.75}, [2]uint32{1, 3}, Forwarded},
		{"one drains", [2]float64{0, 1}, [2]uint32{0, 1}, Forwarded},
		{"all drain", [2]float64{}, [2]uint32{}, Refused},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := usual()
			c.balancer = &kernel.Balancer{Name: "IPVS", Text: "TCP 10.96.0.99:80 wrr"}
			for i, share := range tt.shares {
				at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(2 + i)}), 9000)
				c.balancer.Targets = append(c.balancer.Targets, kernel.BalancerTarget{Address: at, Share: share, Weight: tt.weights[i]})
			}
			r := c.trace(t, "10.1.0.2", "10.96.0.99:80", nil)
			got := map[string]float64{}
			for _, c := range r.Candidates {
				got[c.Endpoint.String()] = c.Probability
			}
			if r.Verdict != tt.verdict || got["10.2.0.2:9000"] != tt.shares[0] || got["10.2.0.3:9000"] != tt.shares[1] {
				t.Errorf("%s, %v, want %s, %v\n%s", r.Verdict, got, tt.verdict, tt.shares, r.Text(Look{}))
			}
		})
	}
}

// TestMartian: addresses that can't be the source of a packet from elsewhere.
func TestMartian(t *testing.T) {
	for a, want := range map[string]bool{"127.0.0.1": true, "224.0.0.1": true, "255.255.255.255": true, "0.0.0.0": true, "10.1.0.2": false, "::1": true, "fd00::2": false} {
		if got := martian(netip.MustParseAddr(a)) != ""; got != want {
			t.Errorf("martian(%s) = %v", a, got)
		}
	}
}
