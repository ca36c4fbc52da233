package plan

import (
	"slices"

	"kproxy.dev/kproxy/service"
)

// topology is which hints of the endpoints are in force.
type topology uint8

const (
	anyTopology topology = iota
	sameZone
	sameNode
)

// topologyOf decides which hints are in force, as kube-proxy does: those for
// nodes if every ready endpoint has some and one names this node; else those
// for zones if every ready endpoint has some and one names this node's zone;
// else none. One endpoint without a hint means that the controller is about
// to add or to withdraw hints, and following a part of them would overload
// the endpoints that have them.
func topologyOf(eps []service.Endpoint, f service.Family, node service.Node) topology {
	allNode, allZone := true, true
	forNode, forZone := false, false
	for i := range eps {
		e := &eps[i]
		if !e.Ready || service.FamilyOf(e.Address.Addr()) != f {
			continue
		}
		allNode = allNode && len(e.NodeHints()) > 0
		allZone = allZone && len(e.ZoneHints()) > 0
		forNode = forNode || hinted(e.NodeHints(), node.Name)
		forZone = forZone || hinted(e.ZoneHints(), node.Zone)
	}
	switch {
	case allNode && forNode:
		return sameNode
	case allZone && forZone:
		return sameZone
	}
	return anyTopology
}

// allows reports whether this node may use e under the hints in force.
func (t topology) allows(e *service.Endpoint, node service.Node) bool {
	switch t {
	case sameNode:
		return hinted(e.NodeHints(), node.Name)
	case sameZone:
		return hinted(e.ZoneHints(), node.Zone)
	}
	return true
}

// hinted reports whether hints name it; a node without a name or a zone is
// never named.
func hinted(hints []string, it string) bool {
	return it != "" && slices.Contains(hints, it)
}
