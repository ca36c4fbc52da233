package trace

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// Proxy is what a running kproxy knows and the kernel doesn't. Functions may be
// nil where there is nobody to ask.
type Proxy struct {
	Plan  *plan.Plan
	Alive bool // its heartbeat is
	Marks kernel.Marks
	// Variant of iptables that it programs.
	Variant kernel.Variant
	// Forecast says what userspace would do with a client's next connection.
	Forecast func(service.Protocol, netip.AddrPort, plan.Client) (userspace.Forecast, bool)
	// Connections is what userspace carries.
	Connections func() []userspace.Connection
	// Missing says which of kproxy's own routes and rules aren't there.
	Missing func() ([]string, error)
	// Render says what a plan wants in the kernel. It is given plans of one service.
	Render func(*plan.Plan) kernel.Ruleset
}

// tracer is one trace.
type tracer struct {
	req   Request
	proxy *Proxy // nil where none runs
	sight *sight

	client   plan.Client
	service  *plan.Service // nil if the plan has none there, or there is no plan
	frontend *plan.Frontend

	seen       visits
	virtual    *ipvs.Seen
	forecast   *userspace.Forecast
	ends       []end
	legs       map[string]int
	steps      []Step
	findings   []Finding
	mismatches []Mismatch
	known      bool // the address is in a set of kproxy's, though no kproxy was asked
	warned     map[string]bool
}

// Check says what is wrong with a request, and how to ask instead.
func (r *Request) Check() error {
	switch {
	case !r.Address.IsValid() || r.Address.Port() == 0:
		return fmt.Errorf("%q is no ADDRESS:PORT; write 10.96.0.10:80 or [fd00::10]:80", r.Address)
	case r.Protocol != service.TCP && r.Protocol != service.UDP:
		return fmt.Errorf("protocol %s can't be traced; use tcp or udp", r.Protocol)
	case r.From.IsValid() && service.FamilyOf(r.From) != service.FamilyOf(r.Address.Addr()):
		return fmt.Errorf("--from %s is of another address family than %s", r.From, r.Address.Addr())
	}
	return nil
}

// Run traces a request in the network namespace of the calling thread. Without a
// proxy, it has what the kernel says alone. The error is about the request, or
// that the kernel can't be read at all; what is wrong on the packet's way is in
// the Result.
func Run(ctx context.Context, req Request, proxy *Proxy) (Result, error) {
	req.Address = netip.AddrPortFrom(req.Address.Addr().Unmap().WithZone(""), req.Address.Port())
	req.From = req.From.Unmap().WithZone("")
	if err := req.Check(); err != nil {
		return Result{}, err
	}
	if proxy != nil && proxy.Plan == nil {
		proxy = nil
	}
	s, err := look(ctx, service.FamilyOf(req.Address.Addr()), proxy)
	if err != nil {
		return Result{}, err
	}
	defer s.close()
	if req.Probe && req.From.IsValid() && !s.local(req.From) {
		return Result{}, fmt.Errorf("%w from %s: it isn't an address of this node; run kproxy trace --probe there, or leave --from out", ErrProbe, req.From)
	}
	t := newTracer(req, proxy, s)
	t.follow()
	t.compare()
	r := t.result()
	if req.Probe {
		r.Probe = t.probe(ctx, &r)
		t.judgeProbe(&r)
	}
	return r, nil
}

func newTracer(req Request, proxy *Proxy, s *sight) *tracer {
	return &tracer{req: req, proxy: proxy, sight: s, legs: map[string]int{}, warned: map[string]bool{}}
}

// follow finds out who the client is and follows its packet.
func (t *tracer) follow() {
	t.checkConntrack()
	for _, n := range t.sight.notes {
		t.warn(SeverityNote, n, "netfilter", "")
	}
	in, ok := t.findClient()
	t.findService()
	switch {
	case !ok:
		back := t.sight.route(query{to: t.req.From})
		w := way{share: 1, certain: true}
		t.showRoute(w, &back, "no answer finds the client")
		t.finish(w, Dropped, t.noRoute(&back))
	case t.client.Node:
		t.originate(t.req.From)
	default:
		t.arrive(in)
	}
}

// findClient finds out who the client is to kproxy, and which interface its
// packets come in on: that whose network it is in, else that of the route back
// to it. False if there is no way back.
func (t *tracer) findClient() (in string, ok bool) {
	from := t.req.From
	if !from.IsValid() || t.sight.local(from) {
		t.client = plan.Client{Address: from, Node: true}
		if !from.IsValid() {
			r := t.sight.route(query{to: t.req.Address.Addr()})
			t.client.Address = r.source
		}
		return "", true
	}
	r := t.sight.route(query{to: from})
	in = t.sight.addresses.linkTo(from)
	if in == "" {
		in = r.link
	}
	t.client = plan.Client{Address: from, Interface: in}
	return in, r.passes()
}

// clientText says who the client is.
func (t *tracer) clientText() string {
	switch {
	case t.client.Node:
		return "this node itself"
	case t.proxy == nil:
		return "another host or a pod, by " + t.client.Interface
	}
	p := &t.proxy.Plan.Policy
	for _, n := range t.proxy.Plan.Node.PodCIDRs {
		if n.Contains(t.client.Address) {
			return "a pod of this node"
		}
	}
	if p.IsPod(t.client) {
		return "a pod"
	}
	return "outside"
}

// findService finds the frontend at the address: a service's own addresses come
// before node ports, as in the kernel.
func (t *tracer) findService() {
	if t.proxy == nil {
		return
	}
	p, to := t.proxy.Plan, t.req.Address
	for _, nodePorts := range []bool{false, true} {
		for _, s := range p.Services {
			for i := range s.Frontends {
				f := &s.Frontends[i]
				if f.Protocol != t.req.Protocol || (f.Kind == plan.NodePort) != nodePorts {
					continue
				}
				if f.Address == to || nodePorts && f.Family == service.FamilyOf(to.Addr()) && f.Address.Port() == to.Port() && t.answersNodePorts(to.Addr()) {
					t.service, t.frontend = s, f
					return
				}
			}
		}
	}
}

// answersNodePorts reports whether node ports answer on an address.
func (t *tracer) answersNodePorts(a netip.Addr) bool {
	return t.sight.local(a) && t.sight.addresses.links[a] != kernel.DummyLink && t.proxy.Plan.Policy.AnswersNodePorts(a)
}

func (t *tracer) serviceName() string {
	if t.service == nil {
		return "the service"
	}
	return t.service.Port.Key.String()
}

// checkConntrack looks whether there is room for another connection.
func (t *tracer) checkConntrack() {
	u, ok := t.sight.conntrack()
	switch {
	case !ok:
	case u.full():
		t.warn(SeverityError, fmt.Sprintf("the table of connections (conntrack) is full: %d of %d entries; the kernel drops new connections", u.count, u.max), "conntrack",
			"raise net.netfilter.nf_conntrack_max (kproxy run --conntrack-max-per-core), or find out who makes so many (kproxy connections)")
	case u.near():
		t.warn(SeverityWarning, fmt.Sprintf("the table of connections (conntrack) is almost full: %d of %d entries", u.count, u.max), "conntrack",
			"raise net.netfilter.nf_conntrack_max (kproxy run --conntrack-max-per-core)")
	}
}

// warn adds a finding, once.
func (t *tracer) warn(severity, what, where, remedy string) {
	if !t.warned[what] {
		t.warned[what] = true
		t.findings = append(t.findings, Finding{severity, what, where, remedy})
	}
}

// finish ends a way.
func (t *tracer) finish(w way, v Verdict, stop *Finding) {
	t.ends = append(t.ends, end{w, v, stop})
}

// Timeout bounds a trace: a host may have a great many rules, and little time.
const Timeout = time.Minute
