package leftovers

import (
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
)

// ownChains lists the chains of kube-proxy's modes iptables and ipvs, and of its
// former userspace mode, by table. Kubelet's are not among them:
// KUBE-KUBELET-CANARY, KUBE-FIREWALL in the table filter, and KUBE-MARK-DROP.
// (KUBE-FIREWALL in the table nat was mode ipvs's.)
var ownChains = map[string][]string{
	"nat": {
		"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-CANARY",
		"KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-FIREWALL",
		"KUBE-PORTALS-CONTAINER", "KUBE-PORTALS-HOST", "KUBE-NODEPORT-CONTAINER", "KUBE-NODEPORT-HOST",
	},
	"filter": {
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY",
		"KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER", "KUBE-NODEPORT-NON-LOCAL",
	},
	"mangle": {"KUBE-PROXY-CANARY"},
}

// hashedChains begin the names of chains of a service or an endpoint, which end
// in 16 characters of base32. KUBE-XLB- was in use until 1.23.
var hashedChains = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-", "KUBE-XLB-"}

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

// What kube-proxy's jumps ask for besides their comment.
const (
	newOnly   = "--ctstate NEW"
	localOnly = "--dst-type LOCAL"
)

// ownJumps are kube-proxy's, by table: those of mode iptables and of mode ipvs
// (pkg/proxy/{iptables,ipvs}/proxier.go of Kubernetes 1.36), those of their
// predecessors back to 1.6, and those of its former userspace mode. A rule that
// leads to another chain, or there on other terms, is another's, such as a
// site's that marks packets by KUBE-MARK-MASQ.
var ownJumps = map[string][]jump{
	"nat": {
		{"PREROUTING", "KUBE-SERVICES", "kubernetes service portals", ""},
		{"OUTPUT", "KUBE-SERVICES", "kubernetes service portals", ""},
		{"POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules", ""},
		{"PREROUTING", "KUBE-PORTALS-CONTAINER", "handle ClusterIPs; NOTE: this must be before the NodePort rules", ""},
		{"OUTPUT", "KUBE-PORTALS-HOST", "handle ClusterIPs; NOTE: this must be before the NodePort rules", ""},
		{"PREROUTING", "KUBE-NODEPORT-CONTAINER", "handle service NodePorts; NOTE: this must be the last rule in the chain", localOnly},
		{"OUTPUT", "KUBE-NODEPORT-HOST", "handle service NodePorts; NOTE: this must be the last rule in the chain", localOnly},
	},
	"filter": {
		{"INPUT", "KUBE-EXTERNAL-SERVICES", "kubernetes externally-visible service portals", newOnly},
		{"FORWARD", "KUBE-EXTERNAL-SERVICES", "kubernetes externally-visible service portals", newOnly},
		{"INPUT", "KUBE-NODEPORTS", "kubernetes health check service ports", ""},
		{"FORWARD", "KUBE-SERVICES", "kubernetes service portals", newOnly},
		{"OUTPUT", "KUBE-SERVICES", "kubernetes service portals", newOnly},
		{"INPUT", "KUBE-SERVICES", "kubernetes service portals", newOnly}, // until 1.16
		{"INPUT", "KUBE-SERVICES", "kubernetes service portals", ""},      // until 1.9, as the next
		{"OUTPUT", "KUBE-SERVICES", "kubernetes service portals", ""},
		{"FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules", ""},
		{"FORWARD", "KUBE-FORWARD", "kubernetes forward rules", ""}, // until 1.9
		{"INPUT", "KUBE-PROXY-FIREWALL", "kubernetes load balancer firewall", newOnly},
		{"OUTPUT", "KUBE-PROXY-FIREWALL", "kubernetes load balancer firewall", newOnly},
		{"FORWARD", "KUBE-PROXY-FIREWALL", "kubernetes load balancer firewall", newOnly},
		{"INPUT", "KUBE-PROXY-FIREWALL", "kube-proxy firewall rules", ""}, // ipvs, as the next
		{"FORWARD", "KUBE-PROXY-FIREWALL", "kube-proxy firewall rules", ""},
		{"INPUT", "KUBE-NODE-PORT", "kubernetes health check rules", ""},
		{"INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter", ""},
		{"OUTPUT", "KUBE-IPVS-OUT-FILTER", "kubernetes ipvs access filter", ""},
		{"INPUT", "KUBE-NODEPORT-NON-LOCAL", "Ensure that non-local NodePort traffic can flow", ""},
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
		case option == "-m" && slices.Contains([]string{"comment", "conntrack", "addrtype"}, argument):
		case option == "--comment" && j.comment == "":
			j.comment = argument
		case (option == "--ctstate" || option == "--dst-type") && j.match == "":
			j.match = option + " " + argument
		case option == "-j" && j.to == "":
			j.to = argument
		default:
			return jump{}, false
		}
	}
	return j, true
}
