// Package trace answers where a connection to an address would go and what
// would stop it: it follows the packet through the hooks of the kernel as they
// are now, read back from it, and through kproxy's own listener where userspace
// serves the service.
//
// A trace changes nothing, and sends nothing unless a probe is asked for. What it
// reads can change meanwhile, so an answer is only as good as the moment. A match
// that it doesn't understand makes the verdict "undetermined", never a guess.
//
// Everything here may be used from several goroutines at once.
package trace

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
	"kproxy.dev/kproxy/userspace"
)

// Proxy holds what a running kproxy knows and the kernel doesn't. Functions may be nil.
type Proxy struct {
	Plan *plan.Plan // nil: there is none to ask
	// Silent says how a kproxy failed to answer that runs, as far as can be seen.
	Silent string
	Alive  bool // its heartbeat is
	Marks  kernel.Marks
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
	// Compare compares plans of one service with the kernel, where they aren't rendered as a Ruleset.
	Compare func(*plan.Plan, service.Family) ([]kernel.Mismatch, error)
	// Explainers are those of the data planes. They need no plan.
	Explainers []kernel.Explainer
}

// tracer is one trace.
type tracer struct {
	req   Request
	proxy *Proxy // nil where none runs
	host  *hostState

	client   plan.Client
	silent   string        // how a kproxy that runs failed to answer
	service  *plan.Service // nil if the plan has none there, or there is no plan
	frontend *plan.Frontend

	explainers []kernel.Explainer
	met        map[chain][]netfilter.Step // the rules that the packet met, once each
	metBack    []netfilter.Step           // those that answers met
	forecast   *userspace.Forecast
	ends       []end
	legs       map[string]int
	steps      []Step
	findings   []Finding
	mismatches []Mismatch
	warned     map[string]bool
	full       bool    // the conntrack table
	departs    bool    // it is in the client's own network namespace, and ends where the packet leaves that
	arrives    bool    // it is in an endpoint's own network namespace
	departed   *Result // what becomes of the packet in the client's own network namespace; nil where that isn't followed
	where      string  // that is
	sent       header  // that the packet leaves it with
	visits     int     // of network namespaces of endpoints
	bridges    map[string]*bridge
	// acceptable are stops of packets that kproxy's own rules accept before, if they are as planned.
	acceptable map[*Finding]bool
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

// settle brings addresses into the form that they are compared in.
func (r *Request) settle() error {
	r.Address = netip.AddrPortFrom(r.Address.Addr().Unmap().WithZone(""), r.Address.Port())
	r.From = r.From.Unmap().WithZone("")
	return r.Check()
}

// Run traces a request in the network namespace of the calling thread. Without a
// proxy, it has what the kernel says alone. The error is about the request, or
// that the kernel can't be read at all; what is wrong on the packet's way is in
// the Result.
func Run(ctx context.Context, req Request, proxy *Proxy) (Result, error) {
	if err := req.settle(); err != nil {
		return Result{}, err
	}
	silent := ""
	var explainers []kernel.Explainer
	if proxy != nil {
		explainers = proxy.Explainers
		if proxy.Plan == nil {
			proxy, silent = nil, proxy.Silent
		}
	}
	s, err := readHost(ctx, service.FamilyOf(req.Address.Addr()), proxy)
	if err != nil {
		return Result{}, err
	}
	defer s.close()
	if req.AnyClient && !req.From.IsValid() {
		if req.From = anyClient(service.FamilyOf(req.Address.Addr()), proxy); !req.From.IsValid() {
			return Result{}, fmt.Errorf("%w: neither a gateway nor a pod of this node is known; say whose connection it is", ErrClient)
		}
	}
	if req, err = s.settleClient(req); err != nil {
		return Result{}, err
	}
	t := newTracer(req, proxy, s)
	t.silent, t.explainers = silent, explainers
	t.follow()
	t.compare()
	r := t.result()
	r.Namespace = spaceName()
	if t.departed != nil {
		r.After(t.where, t.departed)
	}
	if req.Probe {
		r.Probe = t.probe(ctx, &r)
		t.checkProbe(ctx, &r)
	}
	return r, nil
}

// anyClient is the address of the default gateway, which stands for all that is outside, else that of a
// pod of this node; invalid if there is neither.
func anyClient(f service.Family, proxy *Proxy) netip.Addr {
	if gateway := defaultGateway(f); gateway.IsValid() || proxy == nil {
		return gateway
	}
	for _, s := range proxy.Plan.Services {
		for i := range s.Endpoints {
			if e := &s.Endpoints[i]; e.Local && service.FamilyOf(e.Address.Addr()) == f {
				return e.Address.Addr()
			}
		}
	}
	return netip.Addr{}
}

// settleClient finds out where a request's client is: its address by its namespace,
// and for a probe its namespace by its address.
func (s *hostState) settleClient(req Request) (Request, error) {
	var err error
	if req.Pod != "" {
		if req.Netns, err = podSpace(req.Pod); err != nil {
			return req, fmt.Errorf("%w: %w", ErrClient, err)
		}
	}
	if req.Netns != "" && !req.From.IsValid() {
		var r route
		err := inside(req.Netns, func() error {
			if r = askRoute(query{to: req.Address.Addr()}); r.err != nil { // which departure tells
				r.source = someAddress(service.FamilyOf(req.Address.Addr()))
			}
			if r.source.IsValid() {
				return nil
			}
			return r.err
		})
		if err != nil {
			return req, fmt.Errorf("%w: find the address that network namespace %s connects to %s from: %w", ErrClient, req.Netns, req.Address.Addr(), err)
		}
		req.From = r.source
	}
	if req.Probe && req.Netns == "" && req.From.IsValid() && !s.local(req.From) {
		all, err := s.neighbours()
		if err != nil {
			return req, fmt.Errorf("%w from %s: look into the network namespaces of this node: %w", ErrClient, req.From, err)
		}
		g, ok := all.at[req.From]
		if !ok {
			return req, fmt.Errorf("%w: %s is neither an address of this node nor, as far as this process may see, of a network namespace that is linked to it; pass the namespace (--netns), run kproxy trace --probe where that address is, or leave --from out", ErrClient, req.From)
		}
		req.Netns = g.path
	}
	return req, nil
}

func newTracer(req Request, proxy *Proxy, s *hostState) *tracer {
	return &tracer{req: req, proxy: proxy, host: s, met: map[chain][]netfilter.Step{}, legs: map[string]int{}, warned: map[string]bool{}, acceptable: map[*Finding]bool{}, bridges: map[string]*bridge{}}
}

// follow finds out who the client is and follows its packet.
func (t *tracer) follow() {
	t.checkConntrack()
	for _, n := range t.host.notes {
		t.warn(SeverityNote, n, "netfilter", "")
	}
	in, ok := t.findClient()
	t.findService()
	t.departure()
	switch {
	case t.departs:
		t.originate(t.req.From)
	case !ok:
		back := t.host.route(query{to: t.req.From})
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
// to it, or of the default route where a table of its own leads back. False if there is no way back.
func (t *tracer) findClient() (in string, ok bool) {
	from := t.req.From
	elsewhere := t.req.Netns != "" && t.guest(from) != nil // a client that has an address which this node has too
	if t.departs || !from.IsValid() || t.host.local(from) && !elsewhere {
		t.client = plan.Client{Address: from, Node: true}
		if !from.IsValid() {
			r := t.host.route(query{to: t.req.Address.Addr()})
			t.client.Address = r.source
		}
		return "", true
	}
	q := query{to: from}
	if to := t.req.Address.Addr(); t.host.local(to) { // rules for its addresses choose among a node's links
		q.from = to
	}
	r := t.host.route(q)
	in = t.host.addresses.linkTo(from)
	if in == "" {
		in = r.link
	}
	if in == r.link && !q.from.IsValid() && r.table != unix.RT_TABLE_MAIN && r.table != 0 && t.guest(from) == nil {
		in = cmp.Or(t.host.uplink(service.FamilyOf(from)), in) // that of a VPN's own table, which takes what leaves
	}
	if elsewhere {
		in = t.guest(from).by
	}
	t.client = plan.Client{Address: from, Interface: in}
	return in, r.passes()
}

// clientText says who the client is.
func (t *tracer) clientText() string {
	switch {
	case t.departs:
		return "this network namespace"
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
	t.noteOtherPorts()
}

// portsNoted is how many other ports of an address a note names.
const portsNoted = 4

// noteOtherPorts says which ports services have at the address that isn't one of theirs with this port and protocol.
func (t *tracer) noteOtherPorts() {
	var others []string
	for _, s := range t.proxy.Plan.Services {
		for i := range s.Frontends {
			if f := &s.Frontends[i]; f.Kind != plan.NodePort && f.Address.Addr() == t.req.Address.Addr() {
				others = append(others, fmt.Sprintf("%d/%s (%s)", f.Address.Port(), f.Protocol, s.Port.Key))
			}
		}
	}
	if len(others) == 0 {
		return
	}
	rest := ""
	if n := len(others) - portsNoted; n > 0 {
		others, rest = others[:portsNoted], fmt.Sprintf(" and %d more", n)
	}
	t.warn(SeverityNote, fmt.Sprintf("no service has port %d/%s at %s; there are %s%s", t.req.Address.Port(), t.req.Protocol, t.req.Address.Addr(),
		strings.Join(others, ", "), rest), "", "")
}

// answersNodePorts reports whether node ports answer on an address.
func (t *tracer) answersNodePorts(a netip.Addr) bool {
	return t.host.local(a) && t.host.addresses.links[a] != kernel.DummyLink && t.proxy.Plan.Policy.AnswersNodePorts(a)
}

func (t *tracer) serviceName() string {
	if t.service == nil {
		return "the service"
	}
	return t.service.Port.Key.String()
}

// checkConntrack checks that the conntrack table has room for another connection.
func (t *tracer) checkConntrack() {
	count, limit, err := t.host.conntrack()
	switch {
	case err != nil:
	case count >= limit:
		// The kernel drops the first packet of a connection then, unless it can drop an entry
		// without an answer instead (__nf_conntrack_alloc in net/netfilter/nf_conntrack_core.c).
		t.full = true
		t.warn(SeverityError, fmt.Sprintf("the table of connections (conntrack) is full: %d of %d entries; the kernel drops new connections", count, limit), "conntrack",
			"raise net.netfilter.nf_conntrack_max (kproxy run --conntrack-max-per-core), or find out who makes so many (kproxy connections)")
	case count*10 >= limit*9:
		t.warn(SeverityWarning, fmt.Sprintf("the table of connections (conntrack) is almost full: %d of %d entries", count, limit), "conntrack",
			"raise net.netfilter.nf_conntrack_max (kproxy run --conntrack-max-per-core)")
	}
}

// remedyPods is for a service without endpoints that take connections.
const remedyPods = "look at the pods behind it (kproxy status says what each endpoint lacks)"

// warn adds a finding, once.
func (t *tracer) warn(severity, what, where, remedy string) {
	if !t.warned[what] {
		t.warned[what] = true
		t.findings = append(t.findings, Finding{severity, what, where, remedy})
	}
}

// finish ends a way. A rule that isn't kproxy's and leads the packet away from the service's
// endpoints is what is wrong, whatever becomes of the packet there.
func (t *tracer) finish(w way, v Verdict, stop *Finding) {
	if t.strayed(w) {
		s := w.rewrote
		f := &Finding{Severity: SeverityError, Where: place(s), Remedy: t.ruleRemedy(s),
			What: fmt.Sprintf("a rule that isn't kproxy's leads the packet to %s, which is no endpoint of %s: %s", w.packet.Dst, t.serviceName(), s.Text)}
		if stop != nil {
			f.What += "; " + stop.What
		}
		if stop = f; v == Forwarded {
			v = Undetermined
		}
	}
	t.ends = append(t.ends, end{w, v, stop})
}

// strayed reports whether a rule that isn't kproxy's has led the packet to where the
// service has no endpoint.
func (t *tracer) strayed(w way) bool {
	s := w.rewrote
	if s == nil || isOwn(s) || t.service == nil {
		return false
	}
	return w.packet.Redirected || t.planned(w.packet.Dst) == nil
}

// Timeout bounds a trace: a host may have a great many rules, and little time.
const Timeout = time.Minute
