package upstream

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// verdict says what becomes of a connection.
type verdict string

const (
	forward   verdict = "forward"
	reject    verdict = "reject"
	drop      verdict = "drop"
	untouched verdict = "untouched" // not the proxy's: the host does what it does without
)

// outcome is everything that may become of connections alike: verdicts, and endpoints
// with "as the node" where they don't see the client. Sorted.
type outcome []string

func (o *outcome) add(v verdict, backend string) {
	text := strings.TrimSpace(string(v) + " " + backend)
	if at, found := slices.BinarySearch(*o, text); !found {
		*o = slices.Insert(*o, at, text)
	}
}

func (o outcome) is(v verdict) bool { return len(o) == 1 && o[0] == string(v) }

func backendText(a netip.AddrPort, masqueraded bool) string {
	if masqueraded {
		return a.String() + " as the node"
	}
	return a.String()
}

// client is one that tries.
type client struct {
	name    string
	address [2]netip.Addr // by family
	node    bool
	where   place // of the destinations it tries, where not all
}

// place is a kind of destination.
type place string

const (
	clusterIP    place = "cluster IP"
	externalIP   place = "external IP"
	loadBalancer place = "load balancer IP"
	nodePort     place = "node port"
	localhost    place = "node port on localhost"
	elsewhere    place = "node port of another node"
)

// destination is an address and port that a Service's specification mentions.
type destination struct {
	service *corev1.Service
	place   place
	address netip.AddrPort
}

// flow is a connection that is tried.
type flow struct {
	destination
	protocol service.Protocol
	client   *client
	family   service.Family
}

func (f *flow) String() string {
	return fmt.Sprintf("%s (%s) to %s of %s, %s/%s", f.client.name, f.client.address[f.family], f.place, f.service.Name, f.address, f.protocol)
}

func (f *flow) packet(w *world) packet {
	return packet{
		protocol: f.protocol, source: f.client.address[f.family], to: f.address,
		sourceNode: f.client.node, toNode: f.address.Addr().IsLoopback() || slices.Contains(w.addresses(), f.address.Addr()),
	}
}

// decisions is a plan whose frontends are found as a packet finds them, by protocol,
// address and port alone.
type decisions struct {
	*plan.Plan
	frontends map[spot][]frontend
}

// spot says where a frontend answers; node ports have the zero Addr, and their family.
type spot struct {
	protocol service.Protocol
	family   service.Family
	address  netip.AddrPort
}

type frontend struct {
	*plan.Frontend
	of *plan.Service
}

func decisionsOf(p *plan.Plan) *decisions {
	d := &decisions{p, map[spot][]frontend{}}
	for _, s := range p.Services {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			at := spot{f.Protocol, f.Family, f.Address}
			d.frontends[at] = append(d.frontends[at], frontend{f, s})
		}
	}
	return d
}

// decided returns the outcome that the plan has for the flow.
func (f *flow) decided(d *decisions) outcome {
	var out outcome
	c, p := plan.Client{Address: f.client.address[f.family], Node: f.client.node}, &d.Policy
	found := d.frontends[spot{f.protocol, f.family, f.address}]
	if (f.place == nodePort || f.place == localhost) && p.AnswersNodePorts(f.address.Addr()) {
		found = append(slices.Clip(found), d.frontends[spot{f.protocol, f.family, netip.AddrPortFrom(netip.Addr{}, f.address.Port())}]...)
	}
	for _, front := range found {
		switch front.of.VerdictFor(front.Frontend, c, p) {
		case plan.Reject:
			out.add(reject, "")
		case plan.Drop:
			out.add(drop, "")
		case plan.Forward:
			for _, b := range front.of.Backends(front.Frontend, c, p) {
				out.add(forward, backendText(b.Address, front.Masquerades(c, b.Address.Addr(), p)))
			}
		}
	}
	if out == nil {
		out.add(untouched, "")
	}
	return out
}

// destinations are all that s mentions, whether anything serves there or not.
func (w *world) destinations(s *corev1.Service) []destination {
	var out []destination
	add := func(where place, text string, port int32) {
		a, err := parseAddr(text)
		if err == nil && port > 0 {
			out = append(out, destination{s, where, netip.AddrPortFrom(a, uint16(port))})
		}
	}
	for _, port := range s.Spec.Ports {
		for _, a := range s.Spec.ClusterIPs {
			add(clusterIP, a, port.Port)
		}
		for _, a := range s.Spec.ExternalIPs {
			add(externalIP, a, port.Port)
		}
		for _, in := range s.Status.LoadBalancer.Ingress {
			add(loadBalancer, in.IP, port.Port)
		}
		for _, a := range w.addresses() {
			add(nodePort, a.String(), port.NodePort)
		}
		for _, a := range []string{"127.0.0.1", "::1"} {
			add(localhost, a, port.NodePort)
		}
		for _, a := range []string{"10.1.0.77", "fd00:1::77"} {
			add(elsewhere, a, port.NodePort)
		}
	}
	slices.SortFunc(out, func(a, b destination) int { return a.address.Compare(b.address) })
	return slices.CompactFunc(out, func(a, b destination) bool { return a.address == b.address })
}

// flows are all connections that are tried to s: by every client, in every protocol.
func (w *world) flows(s *corev1.Service) []flow {
	var out []flow
	for _, d := range w.destinations(s) {
		for i := range clients {
			c := &clients[i]
			if (d.place == localhost) != (c.where == localhost) {
				continue // nothing else can go there, nor come from there
			}
			for _, protocol := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
				out = append(out, flow{d, protocol, c, service.FamilyOf(d.address.Addr())})
			}
		}
	}
	return out
}

// clients are those that try. here-1 is an endpoint as well, and meets itself.
var clients = []client{
	{name: "a pod on this node", address: both("10.2.0.99", "fd00:2::99")},
	{name: "an endpoint on this node", address: both("10.2.0.1", "fd00:2::1")},
	{name: "a pod elsewhere", address: both("10.2.1.99", "fd00:2:1::99")},
	{name: "this node", address: both("10.1.0.1", "fd00:1::1"), node: true},
	{name: "this node by its second address", address: both("10.9.0.1", "fd00:9::1"), node: true},
	{name: "localhost", address: both("127.0.0.1", "::1"), node: true, where: localhost},
	{name: "another host", address: both("198.18.0.5", "2001:db8:18::5")},
	{name: "a customer", address: both("198.18.7.5", "2001:db8:18:7::5")},
}

func both(v4, v6 string) [2]netip.Addr {
	return [2]netip.Addr{netip.MustParseAddr(v4), netip.MustParseAddr(v6)}
}
