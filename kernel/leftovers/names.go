package leftovers

import (
	"slices"
	"strings"
)

// ownChains are the chains of kube-proxy's modes iptables and ipvs, and of its
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
