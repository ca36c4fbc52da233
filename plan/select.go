package plan

import "kproxy.dev/kproxy/service"

// selection is which endpoints of one family the traffic policies choose,
// before health and weights. Its lists hold indices into the service port's
// endpoints, in order.
type selection struct {
	cluster []int
	local   []int
	// anywhere are those that some node could use: ready, or the fallback.
	anywhere []int
}

// selectEndpoints chooses as kube-proxy v1.36 does (pkg/proxy/topology.go):
// the Cluster list holds the ready endpoints that pass the topology hints, or
// where there is none, all that still serve while they terminate; the Local
// list holds the ready endpoints on this node whatever their hints, or where
// there is none, those on this node that serve while they terminate.
func selectEndpoints(eps []service.Endpoint, f service.Family, node service.Node) selection {
	topology := topologyOf(eps, f, node)
	var s selection
	var terminating, localTerminating []int
	for i := range eps {
		e := &eps[i]
		if service.FamilyOf(e.Address.Addr()) != f {
			continue
		}
		local := isLocal(e, node)
		switch {
		case e.Ready:
			s.anywhere = append(s.anywhere, i)
			if topology.allows(e, node) {
				s.cluster = append(s.cluster, i)
			}
			if local {
				s.local = append(s.local, i)
			}
		case e.Serving && e.Terminating:
			s.anywhere = append(s.anywhere, i)
			terminating = append(terminating, i)
			if local {
				localTerminating = append(localTerminating, i)
			}
		}
	}
	if len(s.cluster) == 0 {
		s.cluster = terminating
	}
	if len(s.local) == 0 {
		s.local = localTerminating
	}
	return s
}

func isLocal(e *service.Endpoint, node service.Node) bool {
	return e.Node != "" && e.Node == node.Name
}
