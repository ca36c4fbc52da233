package steering

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// feature is something rules need, with a rule that has it.
type feature struct {
	name  string
	table string
	rule  string
	how   string
	need  need
}

// need says what a feature is for.
type need int

const (
	better     need = iota // it only makes things better
	byIPTables             // the data plane iptables doesn't work without it
	byAll                  // no mode does
)

// features are tried in order. @set, @address and @network stand for a set, an endpoint and
// a network of the family.
var features = []feature{
	{"nat table", "nat", "-p tcp -j DNAT --to-destination @address", "kernel options CONFIG_NF_NAT, CONFIG_NETFILTER_XT_NAT", byAll},
	{"set match", "nat", "-m set --match-set @set src -j RETURN", "kernel option CONFIG_NETFILTER_XT_SET", byAll},
	{"address type match", "nat", "-m addrtype --dst-type LOCAL -j RETURN", "kernel option CONFIG_NETFILTER_XT_MATCH_ADDRTYPE", byAll},
	{"mark match", "nat", "-m mark --mark 0x1/0x1 -j RETURN", "kernel option CONFIG_NETFILTER_XT_MARK", byAll},
	{"comment match", "nat", "-m comment --comment kproxy -j RETURN", "kernel option CONFIG_NETFILTER_XT_MATCH_COMMENT", byAll},
	{"connection mark", "mangle", "-j CONNMARK --set-xmark 0x1/0x1", "kernel options CONFIG_NETFILTER_XT_CONNMARK, CONFIG_NETFILTER_XT_TARGET_CONNMARK", byAll},
	{"connection state match", "filter", "-m conntrack --ctstate NEW -j REJECT", "kernel options CONFIG_NETFILTER_XT_MATCH_CONNTRACK, CONFIG_IP_NF_TARGET_REJECT", byAll},
	{"socket match", "mangle", "-p tcp -m socket --transparent -j MARK --set-xmark 0x1/0x1",
		"kernel option CONFIG_NETFILTER_XT_MATCH_SOCKET; without it userspace can't keep clients' addresses", better},
	{"packet counts", "mangle", "-p tcp -m connbytes --connbytes 1:1 --connbytes-mode packets --connbytes-dir reply -j RETURN",
		"kernel option CONFIG_NETFILTER_XT_MATCH_CONNBYTES; without it a connection that an endpoint refuses in the kernel is refused to the client", better},
	{"log of refusals", "filter", kernel.LogRefusal(kernel.ReasonNoEndpoint), "kernel options CONFIG_NETFILTER_XT_TARGET_NFLOG, CONFIG_NETFILTER_XT_MATCH_LIMIT, CONFIG_NETFILTER_NETLINK_LOG; " +
		"without it nothing names the clients that rules refuse", better},
	{"statistic match", "nat", "-m statistic --mode nth --every 2 --packet 0 -j RETURN", "kernel option CONFIG_NETFILTER_XT_MATCH_STATISTIC", byIPTables},
	{"set target", "nat", "-j SET --add-set @set src --exist --timeout 1", "kernel option CONFIG_NETFILTER_XT_SET", byIPTables},
	{"masquerade", "nat", "-j MASQUERADE", "kernel option CONFIG_NETFILTER_XT_TARGET_MASQUERADE", byIPTables},
	{"netmap", "nat", "-j NETMAP --to @network",
		"kernel option CONFIG_NETFILTER_XT_TARGET_NETMAP; without it endpoints on a bridge see the node's address of its other pods while a service is in userspace", better},
	{"masquerade --random-fully", "nat", "-j MASQUERADE --random-fully", "iptables 1.6.2 and Linux 3.13; without it source ports may collide under load", better},
}

var (
	probeAddress = [2]string{service.IPv4: "192.0.2.1:1", service.IPv6: "[2001:db8::1]:1"}
	probeNetwork = [2]string{service.IPv4: "192.0.2.0/24", service.IPv6: "2001:db8::/64"}
)

// probeRules tries every feature in a scratch chain: all of a table at once,
// and one by one where that fails, to find out which it is. IPv6 is there if
// everything that works for IPv4 works for IPv6.
func (p *Prober) probeRules(ctx context.Context, h *Host, sets kernel.SetStore) {
	works := map[string][2]bool{} // tables that have all that is needed, by family
	for _, f := range features {
		if _, tried := works[f.table]; tried {
			continue
		}
		same := slices.DeleteFunc(slices.Clone(features), func(o feature) bool { return o.table != f.table })
		var ok [2]bool
		for _, family := range service.Families {
			ok[family] = p.try(ctx, h.Variant, sets, family, same...) == nil
		}
		works[f.table] = ok
	}
	try := func(f feature, family service.Family) error {
		if works[f.table][family] {
			return nil
		}
		return p.try(ctx, h.Variant, sets, family, f)
	}
	v6 := plan.Capability{Name: "ip6tables", Supported: true, Reason: "every rule that IPv4 has"}
	for _, f := range features {
		err := try(f, service.IPv4)
		c := plan.Capability{Name: f.name, Supported: err == nil}
		switch {
		case err == nil:
			c.Reason = "tried in table " + f.table
			if err6 := try(f, service.IPv6); err6 != nil && v6.Supported {
				v6 = plan.Capability{Name: v6.Name, Reason: fmt.Sprintf("%s: %v: install ip6tables, or kernel option CONFIG_IP6_NF_NAT", f.name, err6)}
			}
		case f.need == byAll:
			c.Reason = err.Error()
			h.need(c, f.how, nil)
			continue
		default:
			if c.Reason = fmt.Sprintf("%v: %s", err, f.how); f.need == byIPTables {
				h.withoutRules(c)
			}
		}
		switch f.name {
		case "socket match":
			h.SocketMatch = c.Supported
		case "packet counts":
			h.CatchRefusals = c.Supported
		case "log of refusals":
			h.LogRefusals = c.Supported
		case "netmap":
			h.Netmap = c.Supported
		case "masquerade --random-fully":
			h.RandomFully = c.Supported
		}
		h.Caps.All = append(h.Caps.All, c)
	}
	h.IPv6 = v6.Supported
	h.Caps.All = append(h.Caps.All, v6)
}

// try makes a chain with a rule for each feature, all of one table, and removes it
// again. iptables-restore does all of a table or nothing, so nothing is left when
// a rule is refused.
func (p *Prober) try(ctx context.Context, v kernel.Variant, sets kernel.SetStore, family service.Family, fs ...feature) error {
	set := kernel.Set{Name: kernel.FamilySet(probeSet, family), Type: kernel.HashIP, Family: family, Timeout: 1}
	var rules []string
	for _, f := range fs {
		rules = append(rules, "-A "+probeChain+" "+strings.NewReplacer("@set", set.Name, "@address", probeAddress[family], "@network", probeNetwork[family]).Replace(f.rule))
	}
	text := strings.Join(rules, "\n")
	if strings.Contains(text, set.Name) {
		if err := sets.Create(set); err != nil {
			return err
		}
		defer func() { _ = kernel.DestroySets(context.WithoutCancel(ctx), sets, []string{set.Name}, true) }()
	}
	restore := func(text string) error {
		_, err := p.Runner.Run(ctx, []byte("*"+fs[0].table+"\n:"+probeChain+" - [0:0]\n"+text+"\nCOMMIT\n"), v.Program[family]+"-restore", "--noflush", "-w", "5")
		return err
	}
	if err := restore(text); err != nil {
		return err
	}
	return restore("-X " + probeChain)
}
