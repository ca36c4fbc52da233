package netfilter_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// sources make a base chain of the priority that iptables' has, each in its own way, with one rule. TABLE
// is a name for theirs.
var sources = map[string]map[string]string{
	"nftables of the family": {
		"dnat": `add table IP TABLE; add chain IP TABLE c [ type nat hook prerouting priority -100; ]; add rule IP TABLE c tcp dport 8080 dnat to TO`,
		"snat": `add table IP TABLE; add chain IP TABLE c [ type nat hook postrouting priority 100; ]; add rule IP TABLE c tcp dport 8080 snat to TO`,
		"stop": `add table IP TABLE; add chain IP TABLE c [ type filter hook forward priority 0; ]; add rule IP TABLE c tcp dport 8080 STOP`,
	},
	"nftables of both": {
		"dnat": `add table inet TABLE; add chain inet TABLE c [ type nat hook prerouting priority -100; ]; add rule inet TABLE c tcp dport 8080 dnat IP to TO`,
		"snat": `add table inet TABLE; add chain inet TABLE c [ type nat hook postrouting priority 100; ]; add rule inet TABLE c tcp dport 8080 snat IP to TO`,
		"stop": `add table inet TABLE; add chain inet TABLE c [ type filter hook forward priority 0; ]; add rule inet TABLE c tcp dport 8080 STOP`,
	},
	"iptables": {
		"dnat": `-t nat -A PREROUTING -p tcp --dport 8080 -j DNAT --to-destination TO`,
		"snat": `-t nat -A POSTROUTING -p tcp --dport 8080 -j SNAT --to-source TO`,
		"stop": `-A FORWARD -p tcp --dport 8080 STOP`,
	},
}

func (s *scene) add(source, kind, table, to string) {
	text := strings.NewReplacer("TABLE", table, " TO", " "+to).Replace(sources[source][kind])
	if source == "iptables" {
		stop := map[string]string{"1": "-j DROP", "2": "-j REJECT --reject-with tcp-reset"}[to]
		run(s.t, s.variant.Program[s.family]+" -w 5 "+strings.ReplaceAll(text, "STOP", stop))
		return
	}
	s.nft(strings.ReplaceAll(text, "STOP", map[string]string{"1": "drop", "2": "reject with tcp reset"}[to]))
}

// TestPredictsOrder: of base chains of equal priority the one that was made last comes first, whatever
// made them. For legacy iptables nothing tells what was first, and what depends on it is undecided.
func TestPredictsOrder(t *testing.T) {
	for _, f := range service.Families {
		for first := range sources {
			for second := range sources {
				for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy()} {
					if first == "iptables" && second == "iptables" || v.Name == "legacy" && (f == service.IPv6 || first != "iptables" && second != "iptables") {
						continue
					}
					t.Run(fmt.Sprintf("%s/%s/%s, then %s", f, v.Name, first, second), func(t *testing.T) {
						t.Parallel()
						s := newScene(t, f)
						s.variant = v
						to := netip.AddrPortFrom(s.Address(f, 2), 8080)
						for kind, ends := range map[string][2]string{
							"dnat": {s.Address(f, 3).String(), s.Address(f, 4).String()},
							"snat": {s.NodeAddress(f, 2).String(), s.NodeAddress(f, 3).String()},
							"stop": {"1", "2"},
						} {
							s.add(first, kind, "one", ends[0])
							s.add(second, kind, "another", ends[1])
							predicted, _ := s.predict(s.read(), service.TCP, 1, to)
							if v.Name == "legacy" {
								if predicted.Verdict != "maybe" {
									t.Errorf("%s: predicted %v, want undecided", kind, predicted)
								}
							} else if diff := s.differs(predicted, to); diff != "" {
								t.Errorf("%s (-predicted +real):\n%s", kind, diff)
							}
							run(t, s.script("flush")+"; nft flush ruleset")
						}
					})
				}
			}
		}
	}
}
