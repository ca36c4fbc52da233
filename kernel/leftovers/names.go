package leftovers

import (
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
)

// ownChains are the chains of kube-proxy's modes iptables and ipvs, by table. Kubelet's are not among them:
// KUBE-KUBELET-CANARY, KUBE-FIREWALL in the table filter, and KUBE-MARK-DROP.
// (KUBE-FIREWALL in the table nat was mode ipvs's.)
var ownChains = map[string][]string{
	"nat": {
		"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-CANARY",
		"KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-FIREWALL",
	},
	"filter": {
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY",
		"KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	},
	"mangle": {"KUBE-PROXY-CANARY"},
}

// hashedChains begin the names of chains of a service or an endpoint, which end
// in 16 characters of base32.
var hashedChains = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-"}

func ownChain(table, name string) bool {
	if slices.Contains(ownChains[table], name) {
		return true
	}
	for _, prefix := range hashedChains {
		if hash, ok := strings.CutPrefix(name, prefix); ok {
			return len(hash) == 16 && strings.Trim(hash, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
		}
	}
	return false
}

// ipvsLink is the dummy link of mode ipvs.
const ipvsLink = "kube-ipvs0"

// nftTable is the name of mode nftables's tables, one per family.
const nftTable = "kube-proxy"

// ownSets are those of mode ipvs; those for IPv6 begin in KUBE-6-.
var ownSets = []string{
	"LOOP-BACK", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL",
	"LOAD-BALANCER", "LOAD-BALANCER-LOCAL", "LOAD-BALANCER-FW", "LOAD-BALANCER-SOURCE-IP", "LOAD-BALANCER-SOURCE-CIDR",
	"NODE-PORT-TCP", "NODE-PORT-LOCAL-TCP", "NODE-PORT-UDP", "NODE-PORT-LOCAL-UDP", "NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH",
	"HEALTH-CHECK-NODE-PORT", "IPVS-IPS",
}

// baseOf takes the family from a set's name; empty for others' sets.
func baseOf(set string) string {
	base, ok := strings.CutPrefix(set, "KUBE-")
	if !ok {
		return ""
	}
	base = strings.TrimPrefix(base, "6-")
	if !slices.Contains(ownSets, base) {
		return ""
	}
	return base
}

// jump is a rule in a built-in chain that leads to a chain of kube-proxy's.
type jump struct {
	from, to, comment string
	match             string // what else it asks for; empty: nothing
}

// newOnly is what some of kube-proxy's jumps ask for besides their comment.
const newOnly = "--ctstate NEW"

// ownJumps are kube-proxy's, by table: those of mode iptables and of mode ipvs
// (pkg/proxy/{iptables,ipvs}/proxier.go of Kubernetes 1.36), and of their
// predecessors back to 1.26. A rule that leads to another chain, or there on other
// terms, is another's, such as a site's that marks packets by KUBE-MARK-MASQ.
var ownJumps = map[string][]jump{
	"nat": {
		{"PREROUTING", "KUBE-SERVICES", "kubernetes service portals", ""},
		{"OUTPUT", "KUBE-SERVICES", "kubernetes service portals", ""},
		{"POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules", ""},
	},
	"filter": {
		{"INPUT", "KUBE-EXTERNAL-SERVICES", "kubernetes externally-visible service portals", newOnly},
		{"FORWARD", "KUBE-EXTERNAL-SERVICES", "kubernetes externally-visible service portals", newOnly},
		{"INPUT", "KUBE-NODEPORTS", "kubernetes health check service ports", ""},
		{"FORWARD", "KUBE-SERVICES", "kubernetes service portals", newOnly},
		{"OUTPUT", "KUBE-SERVICES", "kubernetes service portals", newOnly},
		{"FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules", ""},
		{"INPUT", "KUBE-PROXY-FIREWALL", "kubernetes load balancer firewall", newOnly},
		{"OUTPUT", "KUBE-PROXY-FIREWALL", "kubernetes load balancer firewall", newOnly},
		{"FORWARD", "KUBE-PROXY-FIREWALL", "kubernetes load balancer firewall", newOnly},
		{"INPUT", "KUBE-PROXY-FIREWALL", "kube-proxy firewall rules", ""}, // ipvs, as the next
		{"FORWARD", "KUBE-PROXY-FIREWALL", "kube-proxy firewall rules", ""},
		{"INPUT", "KUBE-NODE-PORT", "kubernetes health check rules", ""},
		{"INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter", ""},
		{"OUTPUT", "KUBE-IPVS-OUT-FILTER", "kubernetes ipvs access filter", ""},
	},
}

// ownJump reports whether a rule of a built-in chain is one of kube-proxy's.
func ownJump(table, rule string) bool {
	j, ok := parseJump(rule)
	return ok && slices.Contains(ownJumps[table], j)
}

// parseJump reads a rule that has nothing but what a jump has.
func parseJump(rule string) (j jump, ok bool) {
	words := kernel.Words(rule)
	if len(words)%2 == 0 { // all options that may be there have one argument
		return jump{}, false
	}
	j.from = words[0]
	for i := 1; i < len(words); i += 2 {
		option, argument := words[i], words[i+1]
		switch {
		case option == "-m" && slices.Contains([]string{"comment", "conntrack"}, argument):
		case option == "--comment" && j.comment == "":
			j.comment = argument
		case option == "--ctstate" && j.match == "":
			j.match = option + " " + argument
		case option == "-j" && j.to == "":
			j.to = argument
		default:
			return jump{}, false
		}
	}
	return j, true
}
