package file

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"kproxy.dev/kproxy/source"
)

// portID is what endpoints and Services match their ports by.
type portID struct {
	name     string
	protocol corev1.Protocol
}

func (p portID) String() string { return fmt.Sprintf("%q/%s", p.name, p.protocol) }

// unmatched reports ports of endpoints that the Service doesn't have. In a
// cluster the controllers write both sides; by hand it's easy to name the port
// on one side only, and all that shows is a Service without endpoints.
func unmatched(o *source.Objects, places map[id]place) []Problem {
	ports := map[id][]portID{}
	for _, svc := range o.Services {
		if !source.Serves(svc) {
			continue
		}
		k := id{"Service", svc.Namespace, svc.Name}
		for _, p := range svc.Spec.Ports {
			ports[k] = append(ports[k], portID{p.Name, p.Protocol})
		}
	}
	var problems []Problem
	match := func(from, svc id, field string, p portID) {
		has, known := ports[svc]
		if !known || slices.Contains(has, p) {
			return
		}
		at := places[from]
		problems = append(problems, Problem{File: at.file, Line: at.line,
			Message: fmt.Sprintf("%s: %s: %s has no port %s, its ports are %s", from, field, svc, p, joinPorts(has))})
	}
	for _, s := range o.EndpointSlices {
		from := id{"EndpointSlice", s.Namespace, s.Name}
		svc := id{"Service", s.Namespace, s.Labels[discoveryv1.LabelServiceName]}
		for i, p := range s.Ports {
			if p.Name != nil && p.Protocol != nil {
				match(from, svc, fmt.Sprintf("ports[%d]", i), portID{*p.Name, *p.Protocol})
			}
		}
	}
	for _, e := range o.Endpoints {
		from, svc := id{"Endpoints", e.Namespace, e.Name}, id{"Service", e.Namespace, e.Name}
		for i, sub := range e.Subsets {
			for j, p := range sub.Ports {
				match(from, svc, fmt.Sprintf("subsets[%d].ports[%d]", i, j), portID{p.Name, p.Protocol})
			}
		}
	}
	return problems
}

func joinPorts(list []portID) string {
	names := make([]string, len(list))
	for i, p := range list {
		names[i] = p.String()
	}
	return strings.Join(names, ", ")
}
