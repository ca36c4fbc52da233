package upstream

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// exception is a difference between kproxy and upstream that stays, and why.
type exception struct {
	name, reason string
	// is reports whether a difference is this one.
	is func(f *flow, p *plan.Plan, kproxy, upstream outcome) bool
}

// exceptions are all that are known. One that doesn't occur any more fails the test.
var exceptions = []exception{
	{
		name:   "SCTP in mode userspace",
		reason: "userspace forwards TCP and UDP; without a kernel data plane nothing serves SCTP, and it is refused",
		is: func(f *flow, p *plan.Plan, kproxy, _ outcome) bool {
			return p.Mode == plan.ModeUserspace && f.protocol == service.SCTP && kproxy.is(reject)
		},
	},
	{
		name: "SCTP in mode ipvs with externalTrafficPolicy Local",
		reason: "IPVS can't choose endpoints by client, and userspace, which does it for TCP and UDP, has no SCTP: pods and the node itself reach " +
			"local endpoints only, as in upstream's ipvs mode",
		is: func(f *flow, p *plan.Plan, _, _ outcome) bool {
			return p.Mode == plan.ModeIPVS && f.protocol == service.SCTP && f.place != clusterIP &&
				f.service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && (f.client.node || isPod(f, p))
		},
	},
	{
		name:   "node ports on ::1",
		reason: "kproxy's answer on loopback addresses of both families; upstream's on those of IPv4, in its iptables mode only",
		is: func(f *flow, _ *plan.Plan, _, upstream outcome) bool {
			return f.place == localhost && f.family == service.IPv6 && (upstream.is(untouched) || upstream.is(drop))
		},
	},
	{
		name:   "clients outside of the source ranges of a load balancer without endpoints",
		reason: "kproxy drops them whatever the endpoints, as upstream's nftables mode does; upstream's iptables mode refuses them while there are none",
		is: func(f *flow, _ *plan.Plan, kproxy, upstream outcome) bool {
			return f.place == loadBalancer && len(f.service.Spec.LoadBalancerSourceRanges) > 0 && kproxy.is(drop) &&
				(upstream.is(reject) || f.client.node && upstream.is(untouched)) // the latter as in the next exception
		},
	},
	{
		name: "node ports at addresses that --nodeport-addresses leaves out, without endpoints to use",
		reason: "kproxy leaves the port to the host's own programs; upstream's iptables mode keeps everyone from it, " +
			"because what refuses and drops there asks for local addresses of any kind",
		is: func(f *flow, p *plan.Plan, kproxy, upstream outcome) bool {
			return (f.place == nodePort || f.place == localhost) && !p.Policy.AnswersNodePorts(f.address.Addr()) && kproxy.is(untouched) &&
				(upstream.is(reject) || upstream.is(drop))
		},
	},
	{
		name: "the node itself to an external address without endpoints",
		reason: "upstream's iptables mode has its rules for external addresses in FORWARD and INPUT only, so that the node's own connections " +
			"leave for where the address is routed; kproxy refuses them, as upstream's nftables mode does",
		is: func(f *flow, _ *plan.Plan, kproxy, upstream outcome) bool {
			return f.client.node && (f.place == externalIP || f.place == loadBalancer) && upstream.is(untouched) && kproxy.is(reject)
		},
	},
}

// exceptionFor is which exception a difference is, or -1.
func exceptionFor(f *flow, p *plan.Plan, kproxy, upstream outcome) int {
	return slices.IndexFunc(exceptions, func(e exception) bool { return e.is(f, p, kproxy, upstream) })
}

// isPod reports whether kproxy takes the client for a pod.
func isPod(f *flow, p *plan.Plan) bool {
	return p.Policy.IsPod(plan.Client{Address: f.client.address[f.family], Node: f.client.node})
}
