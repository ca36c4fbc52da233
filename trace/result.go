package trace

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// Request says what to trace.
type Request struct {
	Address  netip.AddrPort   `json:"address"`
	Protocol service.Protocol `json:"protocol"` // TCP or UDP
	// From is the client's address; the zero Addr is this node itself.
	From netip.Addr `json:"from,omitzero"`
	// Probe sends one real connection or datagram, from where the client is.
	Probe bool `json:"-"`
	// Every is for packets that come to the node: Steps hold the ways to all endpoints that are followed,
	// not to the first few, and the client's own network namespace is left out.
	Every bool `json:"-"`
	// AnyClient has From be another host or a pod, whichever is known.
	AnyClient bool `json:"-"`
	// Netns is the path of the client's network namespace, and Pod the name of the pod on
	// this node that it is; empty if From says it all. They imply From.
	Netns string `json:"netns,omitempty"`
	Pod   string `json:"pod,omitempty"`
}

// Verdict says what becomes of the packet.
type Verdict string

// The verdicts. Undetermined is the answer where something in the way could not
// be read or is not understood; Findings say what.
const (
	Forwarded    Verdict = "forwarded"
	Refused      Verdict = "refused"
	Dropped      Verdict = "dropped"
	NotAService  Verdict = "not a service"
	Undetermined Verdict = "undetermined"
	// Leaves is the end of a way in the client's own network namespace: the packet goes on to the node.
	Leaves Verdict = "leaves"
)

// Result is the answer to a Request.
type Result struct {
	Request
	// Namespace is the network namespace that was traced.
	Namespace string `json:"namespace"`
	// Departure is the packet's way before it comes to that; nil where it wasn't followed.
	Departure *Departure `json:"departure,omitempty"`
	// Service is "namespace/name" or "namespace/name:port"; empty if the address
	// is none of a service's, or no plan was there to ask.
	Service string `json:"service"`
	// Kind is "cluster IP", "node port", "external IP", "load balancer" or empty.
	Kind string `json:"kind"`
	// Client says who From is to kproxy: "a pod of this node", "this node
	// itself", "outside", ….
	Client    string         `json:"client"`
	DataPlane plan.DataPlane `json:"dataplane"` // empty without a plan
	State     string         `json:"state"`
	Reason    string         `json:"reason"` // why it is there

	Verdict Verdict `json:"verdict"`
	// Culprit is one sentence: what stops the packet, where, and the remedy; empty
	// if nothing does.
	Culprit    string      `json:"culprit"`
	Candidates []Candidate `json:"candidates"`
	Masquerade Masquerade  `json:"masquerade"`
	Steps      []Step      `json:"steps"` // in the order the packet meets them
	Findings   []Finding   `json:"findings"`
	Mismatches []Mismatch  `json:"mismatches"`
	Probe      *Probe      `json:"probe,omitempty"`
}

// Kinds of steps.
const (
	KindRule          = "rule"
	KindPolicy        = "policy"
	KindRoute         = "route"
	KindVirtualServer = "virtual server"
	KindRealServer    = "real server"
	KindListener      = "listener"
	KindSetting       = "setting"
)

// Step is one thing that the packet meets.
type Step struct {
	// Hook is "PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING",
	// "routing", "userspace" or "IPVS".
	Hook string `json:"hook"`
	Leg  string `json:"leg,omitempty"` // the endpoint, from where the ways to endpoints part
	// Namespace is "network namespace PATH, where endpoint ADDRESS is"; empty for that which is traced.
	Namespace string `json:"namespace,omitempty"`
	Table     string `json:"table,omitempty"` // of netfilter
	// Silent says that the kernel doesn't tell which packets meet it, so that only its counters show.
	Silent bool   `json:"silent,omitempty"`
	Chain  string `json:"chain,omitempty"`
	Kind   string `json:"kind"`
	// Text is the object as the kernel's own tool prints it.
	Text    string  `json:"text"`
	Packets *uint64 `json:"packets,omitempty"` // nil: it has no counter
	Bytes   *uint64 `json:"bytes,omitempty"`
	// Outcome is what it does with this packet: "matches: jump to KPROXY-PORTAL".
	Outcome string `json:"outcome"`
	Why     string `json:"why,omitempty"`
}

// Candidate is an endpoint of the service, whether it may get this packet or
// not.
type Candidate struct {
	Endpoint netip.AddrPort `json:"endpoint"`
	Node     string         `json:"node,omitempty"`
	// Probability that it is the one: 0..1, from what is in the kernel, or from
	// the picker in userspace.
	Probability float64 `json:"probability"`
	Usable      bool    `json:"usable"`
	Health      string  `json:"health,omitempty"`
	// Why says why it is a candidate or isn't, and what would stop the packet on
	// the way to it.
	Why     string  `json:"why,omitempty"`
	Packets *uint64 `json:"packets,omitempty"` // of its DNAT rule or real server
	Bytes   *uint64 `json:"bytes,omitempty"`
}

// Masquerade says whether another address replaces the client's, and why.
type Masquerade struct {
	Yes    bool       `json:"yes"`
	Source netip.Addr `json:"source,omitzero"` // that the endpoint sees; zero if unknown
	Reason string     `json:"reason"`
}

// Severities of findings. An error stops the packet, or would one to some
// endpoint; a warning makes trouble possible; a note explains.
const (
	SeverityError   = "error"
	SeverityWarning = "warning"
	SeverityNote    = "note"
)

// Finding is something that a person should know about the way.
type Finding struct {
	Severity string `json:"severity"`
	What     string `json:"what"`
	Where    string `json:"where"`
	Remedy   string `json:"remedy,omitempty"`
}

// text is all of a finding in one line.
func (f *Finding) text() string {
	out := f.What
	if f.Where != "" {
		out += " (" + f.Where + ")"
	}
	if f.Remedy != "" {
		out += "; remedy: " + f.Remedy
	}
	return out
}

// Mismatch is a difference between the plan and the kernel.
type Mismatch = kernel.Mismatch

// Probe says what became of a real connection or datagram.
type Probe struct {
	// From says where it was sent from.
	From string `json:"from"`
	// Outcome is "connected", "answered", "refused", "timeout", "unreachable" or,
	// for a datagram without an answer, "no answer".
	Outcome  string         `json:"outcome"`
	Endpoint netip.AddrPort `json:"endpoint,omitzero"` // that answered, as far as conntrack tells
	Seconds  float64        `json:"seconds"`
	// Conntrack are its own entries, as conntrack -L prints them.
	Conntrack []string `json:"conntrack"`
	Note      string   `json:"note,omitempty"`
	// Says tells whether that confirms the verdict, or contradicts it.
	Says string `json:"says"`
}

// result puts together what was found.
func (t *tracer) result() Result {
	r := Result{Request: t.req, Client: t.clientText(), Steps: t.steps, Mismatches: []Mismatch{}}
	if t.service != nil {
		s := t.service
		r.Service, r.Kind, r.DataPlane, r.State, r.Reason = s.Port.Key.String(), kindText(t.frontend.Kind), s.DataPlane, string(s.State), s.Reason
	}
	r.Candidates = t.candidates()
	r.Verdict = t.verdict()
	r.Masquerade = t.masquerade()
	t.addStops(&r)
	t.checkPlan(&r)
	r.Mismatches = append(r.Mismatches, t.mismatches...)
	r.Findings = append([]Finding{}, t.findings...)
	r.sortFindings()
	r.Culprit = culprit(&r)
	if r.Steps == nil {
		r.Steps = []Step{}
	}
	return r
}

// sortFindings brings the worst to the front.
func (r *Result) sortFindings() {
	slices.SortStableFunc(r.Findings, func(a, b Finding) int { return cmp.Compare(severity(a), severity(b)) })
}

func severity(f Finding) int {
	return slices.Index([]string{SeverityError, SeverityWarning, SeverityNote}, f.Severity)
}

func kindText(k plan.Kind) string {
	return map[plan.Kind]string{
		plan.ClusterIP: "cluster IP", plan.NodePort: "node port", plan.ExternalIP: "external IP", plan.LoadBalancer: "load balancer",
	}[k]
}

// verdict returns what becomes of the packet: the first of Leaves, Forwarded,
// Refused, Dropped and NotAService that some way leads to; Dropped if conntrack's
// table is full. A way that isn't certain to be taken makes it Undetermined,
// unless it leads to the same as all others.
func (t *tracer) verdict() Verdict {
	if t.full {
		return Dropped
	}
	all, doubtful := map[Verdict]bool{}, false
	for _, e := range t.ends {
		if e.share > 0 {
			all[e.verdict] = true
			doubtful = doubtful || !e.certain || e.verdict == Undetermined
		}
	}
	for _, v := range []Verdict{Leaves, Forwarded, Refused, Dropped, NotAService} {
		if all[v] && (!doubtful || len(all) == 1) {
			return v
		}
	}
	return Undetermined
}

// addStops turns what stops the packet into findings.
func (t *tracer) addStops(r *Result) {
	for _, e := range t.ends {
		if e.stop == nil || e.share == 0 {
			continue
		}
		f := *e.stop
		if m, ok := t.unaccepted(&e); ok {
			f.What = fmt.Sprintf("kproxy's own rule doesn't accept the packet, because %s is %s; so %s", m.Object, m.Kernel, f.What)
			f.Remedy = t.repairs()
		}
		if r.Verdict == Leaves {
			f.What = fmt.Sprintf("%s of new connections: %s", percent(e.share), f.What)
		}
		if e.endpoint.IsValid() && t.anyForwarded() {
			f.What = fmt.Sprintf("on the way to %s (%s of new connections): %s", e.endpoint, percent(e.share), f.What)
			if e.userspace {
				f.What += "; userspace tries another endpoint then"
			}
		} else if e.userspace && e.verdict == Dropped && t.req.Protocol == service.TCP && !e.packet.Redirected {
			f.What += "; kproxy gives up after a while, and resets the client's connection"
		}
		if !e.certain && r.Verdict == Undetermined {
			f.Severity, f.What = SeverityWarning, "it can't be told whether "+f.What
		}
		t.warn(f.Severity, f.What, f.Where, f.Remedy)
	}
	for _, e := range t.ends {
		if !e.certain && e.doubt != "" && r.Verdict == Undetermined {
			t.warn(SeverityWarning, "whether the packet takes every turn as said can't be told: "+e.doubt, "", "kproxy trace --probe finds out")
		}
	}
}

// unaccepted returns what is missing in kproxy's own sets, so that what would have accepted
// the packet didn't; false if that isn't why it was stopped.
func (t *tracer) unaccepted(e *end) (Mismatch, bool) {
	entry := "entry " + kernel.AddressEntry(t.req.Protocol, e.endpoint)
	i := slices.IndexFunc(t.mismatches, func(m Mismatch) bool {
		return t.acceptable[e.stop] && e.endpoint.IsValid() && strings.HasPrefix(m.Object, entry) && strings.Contains(m.Object, kernel.SetEndpoint)
	})
	if i < 0 {
		return Mismatch{}, false
	}
	return t.mismatches[i], true
}

// anyForwarded reports whether some way leads to an endpoint.
func (t *tracer) anyForwarded() bool {
	return slices.ContainsFunc(t.ends, func(e end) bool { return e.verdict == Forwarded && e.share > 0 })
}

// candidates are the plan's endpoints, and those that the kernel leads to.
func (t *tracer) candidates() []Candidate {
	out := []Candidate{}
	at := map[netip.AddrPort]int{}
	if t.service != nil {
		for i := range t.service.Endpoints {
			e := &t.service.Endpoints[i]
			if service.FamilyOf(e.Address.Addr()) != service.FamilyOf(t.req.Address.Addr()) {
				continue
			}
			at[e.Address] = len(out)
			c := Candidate{Endpoint: e.Address, Node: e.Node, Usable: e.Usable, Health: e.Health, Why: t.unusable(e)}
			if e.IsEjected() {
				c.Health = health.Down.String()
			}
			out = append(out, c)
		}
	}
	for _, e := range t.ends {
		if !e.endpoint.IsValid() {
			continue
		}
		i, ok := at[e.endpoint]
		if !ok {
			i = len(out)
			at[e.endpoint] = i
			c := Candidate{Endpoint: e.endpoint, Usable: true}
			if t.service != nil {
				c.Usable, c.Why = false, "it isn't an endpoint of the service in the plan"
			}
			out = append(out, c)
		}
		c := &out[i]
		c.Probability = t.chosen(e.endpoint)
		c.Packets, c.Bytes = e.packets, e.bytes
		if c.Why == "" {
			c.Why = e.why
		}
		if e.stop != nil {
			c.Why = e.stop.What
			if !e.certain {
				c.Why = "maybe " + c.Why
			}
		}
	}
	explainChoice(out, t.service != nil && t.service.Port.Affinity > 0)
	slices.SortStableFunc(out, func(a, b Candidate) int {
		return cmp.Compare(math.Round(1e6*b.Probability), math.Round(1e6*a.Probability))
	})
	return out
}

// explainChoice says of usable endpoints why one of several gets all of the client's
// connections and the others none, where nothing else has said so. stays: the service has
// session affinity.
func explainChoice(all []Candidate, stays bool) {
	usable := func(c Candidate) bool { return c.Usable }
	chosen := slices.IndexFunc(all, func(c Candidate) bool { return c.Usable && c.Probability > 1-1e-9 })
	if chosen < 0 || !slices.ContainsFunc(slices.Delete(slices.Clone(all), chosen, chosen+1), usable) {
		return
	}
	if c := &all[chosen]; c.Why == "" && stays {
		c.Why = whyAffinity
	}
	why := "the client's next connection goes to " + all[chosen].Endpoint.String()
	if all[chosen].Why == whyAffinity {
		why = "the client stays with " + all[chosen].Endpoint.String()
	}
	for i := range all {
		if c := &all[i]; c.Usable && c.Probability == 0 && c.Why == "" {
			c.Why = why
		}
	}
}

// chosen returns how likely an endpoint is chosen, whatever becomes of the packet
// then. Where it can't be said whether a rule on the way there matches, there are
// ends for either case, each with the whole probability.
func (t *tracer) chosen(endpoint netip.AddrPort) float64 {
	var certain, most float64
	either := map[string]float64{}
	for _, e := range t.ends {
		switch {
		case e.endpoint != endpoint:
		case e.certain:
			certain += e.share
		default:
			fate := string(e.verdict)
			if e.stop != nil {
				fate += e.stop.What
			}
			either[fate] += e.share
			most = max(most, either[fate])
		}
	}
	return min(1, certain+most)
}

// anyway says why an endpoint that is down or ejected gets connections; empty if it doesn't.
func anyway(e *plan.Endpoint) string {
	if !e.Usable {
		return ""
	}
	return "; used, as all are when none is up"
}

// unusable says why an endpoint gets no new connection from this client; empty
// if it does.
func (t *tracer) unusable(e *plan.Endpoint) string {
	switch {
	case e.Excluded:
		return "another proxy's (--exclude-cidrs)"
	case e.Terminating && !e.Serving:
		return "terminates"
	case e.IsEjected() && e.Usable:
		return e.Ejected.Text(time.Now()) + anyway(e)
	case e.IsEjected():
		return "would be used, but is " + e.Ejected.Text(time.Now())
	case e.Health == "down":
		why := strings.TrimSuffix("its health check fails: "+e.Error, ": ")
		if cause := t.cause(e); cause != "" {
			why += " (" + cause + ")"
		}
		return why + anyway(e)
	case e.Terminating:
		return "terminates; used only while all do"
	case !e.Ready:
		return "isn't ready"
	case e.Weight == 0:
		return "drains (weight 0)"
	case t.frontend != nil && !e.Local && t.frontend.Local && !t.usedEndpoint(e.Address):
		return "is on another node, and the traffic policy is Local"
	case !e.Usable || t.frontend != nil && !t.usedEndpoint(e.Address):
		return "isn't used from this node"
	}
	return ""
}

// usedEndpoint reports whether the plan lets this client's connections go to an endpoint.
func (t *tracer) usedEndpoint(a netip.AddrPort) bool {
	return slices.ContainsFunc(t.service.Backends(t.frontend, t.client, &t.proxy.Plan.Policy), func(b plan.Backend) bool { return b.Address == a && b.Weight > 0 })
}

// masquerade says which address the endpoints see, and why.
func (t *tracer) masquerade() Masquerade {
	m := Masquerade{Reason: "nothing reaches an endpoint"}
	all, masked := 0, 0
	for _, e := range t.ends {
		if e.verdict != Forwarded || !e.endpoint.IsValid() || e.share == 0 {
			continue
		}
		all++
		if !e.changesSource(t.client) {
			continue
		}
		if masked++; masked == 1 {
			m.Yes, m.Source = true, e.packet.Src.Addr()
		}
	}
	switch {
	case all == 0:
	case m.Yes:
		m.Reason = t.masqueradeReason(m.Source)
		if masked < all {
			m.Reason += fmt.Sprintf("; only on the way to %d of %d endpoints", masked, all)
		}
	default:
		m.Source = t.client.Address
		m.Reason = t.plainReason()
	}
	return m
}

// changesSource reports whether the endpoint sees another address than the
// client's.
func (e *end) changesSource(c plan.Client) bool {
	return e.packet.Src.Addr() != c.Address && (e.masked != "" || e.userspace && !e.transparent)
}

func (t *tracer) masqueradeReason(source netip.Addr) string {
	var rule string
	for _, e := range t.ends {
		if e.verdict == Forwarded && e.masked != "" {
			rule = ", by " + e.masked
		} else if e.verdict == Forwarded && e.userspace && rule == "" {
			rule = ", which userspace connects from"
		}
	}
	sees := "an address of this node"
	if source.IsValid() {
		sees = source.String()
	}
	text := "the endpoint sees " + sees + rule
	if why := t.planReason(); why != "" {
		text += ": " + why
	}
	return text
}

// planReason says why the plan masquerades this client.
func (t *tracer) planReason() string {
	f := t.frontend
	if f == nil {
		return ""
	}
	switch {
	case f.Masquerade == plan.MasqueradeAlways && f.Kind == plan.ClusterIP:
		return "--masquerade-all"
	case f.Masquerade == plan.MasqueradeAlways:
		return "endpoints may be on other nodes, whose answers would otherwise not pass this one"
	case f.Masquerade == plan.MasqueradeUnlessPod && !t.proxy.Plan.Policy.IsPod(t.client):
		return "the client isn't known to be a pod"
	case f.Masquerade == plan.MasqueradeNodeLocal && t.client.Node:
		return "the client is this node itself"
	}
	return "client and endpoint would otherwise answer each other without passing this node"
}

func (t *tracer) plainReason() string {
	switch {
	case t.client.Node:
		return "this node connects from its own address"
	case t.frontend == nil:
		return "no rule changes the source"
	case t.frontend.Masquerade == plan.MasqueradeNodeLocal:
		return "the traffic policy is Local, which keeps clients' addresses"
	case t.frontend.Masquerade == plan.MasqueradeUnlessPod:
		return "the client is a pod, whose answers come back through this node"
	}
	return "the plan keeps clients' addresses here"
}

func percent(p float64) string { return fmt.Sprintf("%.3g %%", 100*p) }

// checkPlan adds what the plan says is wrong.
func (t *tracer) checkPlan(r *Result) {
	if t.departs {
		return
	}
	if t.proxy == nil {
		if t.silent != "" {
			t.warn(SeverityError, "kproxy hangs: it runs, and doesn't answer ("+t.silent+"). This is what the kernel does by itself", "kproxy run", "look at its log, and restart it")
			return
		}
		t.warn(SeverityNote, "kproxy isn't running or wasn't asked: this is what the kernel says alone, without the plan and what userspace would choose", "", "")
		return
	}
	if !t.proxy.Alive {
		t.warn(SeverityWarning, "kproxy's heartbeat has stopped: new connections go by the kernel's own rules, and a service that has none isn't served", "set KPROXY-ALIVE",
			"look at kproxy's log and at kproxy status; restart it")
	}
	if t.service == nil {
		return
	}
	for _, p := range t.service.Problems {
		t.warn(SeverityWarning, p, t.service.Port.Source, "")
	}
	for _, c := range r.Candidates {
		if c.Probability > 0 && c.Health == "down" && !t.stops(c.Endpoint) {
			t.warn(SeverityError, fmt.Sprintf("%s gets %s of new connections, but is down: %s", c.Endpoint, percent(c.Probability), c.Why), "endpoint "+c.Endpoint.String(),
				"look at the pod: it doesn't answer")
		}
	}
	t.checkVerdict(r)
}

// stops reports whether a finding says already what ends the way to an endpoint.
func (t *tracer) stops(endpoint netip.AddrPort) bool {
	return slices.ContainsFunc(t.ends, func(e end) bool { return e.endpoint == endpoint && e.stop != nil })
}

// checkVerdict compares what becomes of the packet with what is planned.
func (t *tracer) checkVerdict(r *Result) {
	p := &t.proxy.Plan.Policy
	want := t.service.VerdictFor(t.frontend, t.client, p)
	switch {
	case want == plan.Forward && r.Verdict == NotAService && t.untracked():
		where, remedy := "raw", "iptables-save -t raw, or nft list ruleset, shows it"
		if s := t.metRule("NOTRACK"); s != nil {
			where, remedy = place(s), t.ruleRemedy(s)
		}
		t.warn(SeverityError, "a rule that isn't kproxy's keeps conntrack from the packet (NOTRACK), so that its destination can't be translated", where, remedy)
	case want == plan.Forward && r.Verdict == NotAService:
		if f := t.takenBefore(); f != nil {
			t.warn(f.Severity, f.What, f.Where, f.Remedy)
			break
		}
		t.warn(SeverityError, fmt.Sprintf("nothing in the kernel leads packets for %s to %s's endpoints", t.req.Address, t.serviceName()), "netfilter", t.repairs())
	case want != plan.Forward && r.Verdict == NotAService && r.Service != "":
		t.warn(SeverityError, t.notForwarded(want), "plan", "")
	case want != plan.Forward && r.Verdict == Forwarded:
		t.mismatch("verdict for "+t.req.Address.String(), string(want), "forwarded")
	}
}

// untracked reports whether the packet went on without an entry in conntrack.
func (t *tracer) untracked() bool {
	return slices.ContainsFunc(t.ends, func(e end) bool { return e.packet.State == netfilter.Untracked })
}

func (t *tracer) notForwarded(v plan.Verdict) string {
	switch {
	case !t.frontend.Allows(t.client):
		return t.notAdmitted()
	case v == plan.Drop:
		return t.noLocalEndpoint()
	}
	return t.noUsableEndpoint()
}

func (t *tracer) notAdmitted() string {
	return fmt.Sprintf("%s isn't in the source ranges that %s admits", t.client.Address, t.serviceName())
}

func (t *tracer) noLocalEndpoint() string {
	return t.serviceName() + " has no endpoint on this node, and its traffic policy is Local"
}

func (t *tracer) noUsableEndpoint() string {
	return t.serviceName() + " has no endpoint that takes connections" + t.noEndpoints()
}

func (t *tracer) repairs() string {
	return "kproxy repairs its own objects within seconds; if this lasts, look at its log, or restart it"
}

// culprit is one sentence: what stops the packet, where, and the remedy; empty if
// nothing does. A way that only some connections take counts too.
func culprit(r *Result) string {
	pick := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.Severity == SeverityError })
	differs := ""
	if len(r.Mismatches) > 0 {
		m := r.Mismatches[0]
		differs = fmt.Sprintf("%s isn't as planned: planned is %s, in the kernel is %s; ", m.Object, m.Planned, m.Kernel)
	}
	switch {
	case pick < 0 && differs != "" && r.Verdict != Forwarded:
		return differs + "kproxy repairs it within seconds, or restart it."
	case pick < 0:
		return ""
	case r.Verdict != NotAService:
		differs = ""
	}
	return strings.TrimSuffix(differs+r.Findings[pick].text(), ".") + "."
}
