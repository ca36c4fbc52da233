package nftables

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// podNumbers is where the numbers of the endpoints begin that pods and this node may use,
// where other clients use those on this node only.
const podNumbers = 1 << 16

// treatment says what a chain does with connections. Frontends that are treated alike share
// a chain, across services: so there are as many chains as numbers of endpoints in use,
// not as services. Only a service that asks for turns has chains of its own.
type treatment struct {
	node       bool // a node port
	endpoints  int  // numbers to choose from
	pods       int  // the same for pods and this node; 0 where they are treated as all others
	masquerade plan.Masquerade
	affinity   int    // seconds
	home       string // with affinity: as which address of the service it is remembered; empty for that it is met at
	turns      string // the service whose endpoints take turns, as a word of nft's; empty for random choice
	bySource   bool   // the client's address chooses
}

// isTreatment reports whether a chain is a treatment's, by its name.
var isTreatment = regexp.MustCompile(`(^|-)pick-[0-9]`).MatchString

// chain is the name of its chain: "pick-3", "node-port-masquerade-pick-2-pods-5-affinity-3h".
func (t treatment) chain() string {
	out := ""
	if t.node {
		out = "node-port-"
	}
	switch t.masquerade {
	case plan.MasqueradeAlways:
		out += "masquerade-"
	case plan.MasqueradeUnlessPod:
		out += "masquerade-unless-pod-"
	case plan.MasqueradeNodeLocal:
		out += "masquerade-node-clients-"
	}
	out += "pick-" + strconv.Itoa(t.endpoints)
	if t.pods > 0 {
		out += "-pods-" + strconv.Itoa(t.pods)
	}
	if t.bySource {
		out += "-by-source"
	}
	if t.affinity > 0 {
		out += "-affinity-" + secondsText(t.affinity)
	}
	if t.home != "" {
		out += "-as-" + homeText(t.home)
	}
	if t.turns != "" {
		out += "-in-turn-" + t.turns
	}
	return out
}

// turnsOf is the treatment's turns of a service that asks for round robin, weighted or not:
// "default/web/http/tcp". Where it is the default, random choice does, by rules that services share.
func turnsOf(p *service.Port) string {
	if !p.AlgorithmGiven || p.Algorithm != service.RoundRobin && p.Algorithm != service.WeightedRoundRobin {
		return ""
	}
	return strings.ReplaceAll(p.Key.String(), ":", "/") + "/" + strings.ToLower(p.Protocol.String())
}

// treat returns the chains of t: those that it leads to come first.
func (r *rules) treat(t treatment) []Chain {
	var begin []Rule
	switch t.masquerade {
	case plan.MasqueradeAlways:
		begin = append(begin, rule(r.mark()))
	case plan.MasqueradeUnlessPod:
		begin = append(begin, rule(jumpTo(chainOutsiders)))
	case plan.MasqueradeNodeLocal:
		begin = append(begin, rule(jumpTo(chainOwn)))
	}
	var out []Chain
	if t.pods > 0 {
		pods := t
		pods.masquerade, pods.endpoints, pods.pods = plan.MasqueradeNever, t.pods, 0
		out = r.choose(t.chain()+"-of-all", pods, podNumbers, nil)
		target := goesTo(out[len(out)-1].Name)
		begin = append(append(begin, r.pods(target)...), rule(saddrFib.is("local", native(unix.RTN_LOCAL)...), target))
	}
	return append(out, r.choose(t.chain(), t, 0, begin)...)
}

// withTreatments are the chains of the family with those of treatments, in a fixed order.
func (r *rules) withTreatments(wanted map[treatment]int) []Chain {
	return append(r.chains(), r.treatments(wanted)...)
}

func (r *rules) treatments(wanted map[treatment]int) (out []Chain) {
	for t := range wanted {
		out = append(out, r.treat(t)...)
	}
	slices.SortFunc(out, func(a, b Chain) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// choose returns the chain that rewrites the destination, after the rules it begins with.
// With affinity there is another before it, for clients that have an endpoint: it returns
// where that endpoint is gone. An endpoint that was chosen meanwhile, for another connection
// of the client, is the client's.
//
// A packet that is here while a transaction is carried out may have a number of which an
// endpoint is no more. It is dropped: else conntrack would remember for every packet that follows
// that nothing rewrote the first, and the client would connect in vain for minutes.
func (r *rules) choose(chain string, t treatment, offset int, begin []Rule) []Chain {
	k := r.to()
	if t.node {
		k = r.node()
	}
	if t.endpoints == 0 {
		return []Chain{{Name: chain, Rules: begin}}
	}
	gone := rule(drop, comment("that endpoint has just gone: the next packet finds another"))
	chosen := numgen(t.turns != "", t.endpoints, offset)
	if t.bySource {
		chosen = hashed(saddr[r.family], t.endpoints, offset)
	}
	number := append(k, chosen)
	if t.affinity == 0 {
		return []Chain{{Name: chain, Rules: append(begin, rule(number.to(r.family, setBackends)), gone)}}
	}
	client, kept := append(key{saddr[r.family]}, r.home(k, t.home)...), append(k, scratch)
	known := Chain{Name: chain + "-again", Rules: []Rule{
		rule(client.dynset(setAffinity, t.affinity)),
		rule(kept.to(r.family, setBackends)),
		rule(client.dynset(setAffinity, 0), comment("that endpoint is gone")),
	}}
	return []Chain{known, {Name: chain, Rules: append(begin,
		rule(client.setScratch(setAffinity), jumpTo(known.Name)),
		rule(number.setScratch(setChoices)),
		rule(client.dynset(setAffinity, t.affinity)),
		rule(client.setScratch(setAffinity)),
		rule(kept.to(r.family, setBackends)),
		gone,
	)}}
}

// home is the key of a service's address as which clients are remembered, whichever of its addresses they
// use: they stay with one endpoint for all, as with kube-proxy. It is that of the packet, k, unless an address is given.
func (r *rules) home(k key, address string) key {
	if address == "" {
		return k
	}
	n := typeAddr[r.family].size
	port := address[n+registerAlign:][:typePort.size]
	return key{constant(daddr[r.family], typeAddr[r.family], address[:n]), l4proto, constant(dport, typePort, port)}
}

// keyOf is an address of a service as a key.
func keyOf(f *plan.Frontend) string {
	return destination(addressOf(f), f.Protocol, f.Address.Port())
}

// homeOf is the address as which clients of one of a service's are remembered: the first of its family. One with a
// traffic policy is its own: a client that another address led to an endpoint elsewhere mustn't be sent there.
func homeOf(s *plan.Service, f *plan.Frontend) string {
	for i := range s.Frontends {
		if at := &s.Frontends[i]; at.Family == f.Family && !at.Local && !f.Local {
			return keyOf(at)
		}
	}
	return keyOf(f)
}

// homeText is one as part of a chain's name, in which nft reads no colon.
func homeText(key string) string {
	n := len(key) - 2*registerAlign
	a, _ := netip.AddrFromSlice([]byte(key[:n]))
	return strings.ReplaceAll(a.String(), ":", "_") + "-" + text([]Type{typePort}, key[n+registerAlign:])
}

// member is an element of a set, as part of what a service wants.
type member struct {
	family service.Family
	set    string
	Element
}

// members collects what services want.
type members struct {
	list       []member
	treatments [2][]treatment
}

func (m *members) put(f service.Family, set string, e Element) {
	m.list = append(m.list, member{f, set, e})
}

// zero stands for any address of the node.
var zero = [2]netip.Addr{service.IPv4: netip.IPv4Unspecified(), service.IPv6: netip.IPv6Unspecified()}

// addressOf is a frontend's address in keys.
func addressOf(f *plan.Frontend) netip.Addr {
	if f.Kind == plan.NodePort {
		return zero[f.Family]
	}
	return f.Address.Addr()
}

// addService adds what s wants while nftables carries it; nothing for nil.
func (m *members) addService(s *plan.Service) {
	if s == nil || s.Kernel != plan.NFTables {
		return
	}
	for i := range s.Frontends {
		if f := &s.Frontends[i]; s.Serves(f) {
			m.addFrontend(s, f)
		}
	}
}

func (m *members) addFrontend(s *plan.Service, f *plan.Frontend) {
	g := &s.Groups[f.Family]
	group, pods := g.Cluster, []plan.Backend(nil)
	if f.Local {
		if group = g.Local; f.ShortCircuit {
			pods = g.Cluster
		}
	}
	t := treatment{node: f.Kind == plan.NodePort, masquerade: f.Masquerade, turns: turnsOf(s.Port), bySource: s.Port.Algorithm == service.SourceHash}
	at := addressOf(f)
	to := keyOf(f)
	if s.Port.Affinity > 0 {
		t.affinity = int(max(1, (s.Port.Affinity+time.Second-1)/time.Second))
		if home := homeOf(s, f); home != to {
			t.home = home
		}
	}
	t.endpoints = m.addBackends(s, f, at, group, 0)
	t.pods = m.addBackends(s, f, at, pods, podNumbers)
	m.treatments[f.Family] = append(m.treatments[f.Family], t)
	m.put(f.Family, setServices, Element{Key: to, Verdict: codeGoto, Chain: t.chain(), Comment: s.Port.Key.String()})
}

// addBackends numbers a group's endpoints from a number on, and returns how many there are.
// Keys are parts of one string: there are many.
func (m *members) addBackends(s *plan.Service, f *plan.Frontend, at netip.Addr, group []plan.Backend, from uint32) int {
	if len(group) == 0 {
		return 0
	}
	var room [48]byte
	slots, to, addr := slotsOf(s.Port, group), destination(at, f.Protocol, f.Address.Port()), typeAddr[f.Family].size
	width := 2*addr + 2*registerAlign // of what is kept of an endpoint: destination and address
	text := make([]byte, 0, len(slots)*(len(to)+registerAlign)+len(group)*(width+addr+registerAlign))
	for _, e := range group {
		a := append(room[:0], e.Address.Addr().AsSlice()...)
		port := e.Address.Port()
		text = append(append(text, a...), byte(s.Port.Protocol), 0, 0, 0, byte(port>>8), byte(port), 0, 0)
		text = append(append(text, a...), a...)
		text = append(text, byte(port>>8), byte(port), 0, 0)
	}
	keys := len(text)
	for n := range slots {
		text = binary.NativeEndian.AppendUint32(append(text, to...), from+uint32(n))
	}
	all := string(text)
	m.list = slices.Grow(m.list, len(slots)+2*len(group))
	seen := make([]bool, len(group))
	for n, i := range slots {
		k := all[keys+n*(len(to)+registerAlign):][:len(to)+registerAlign]
		e := all[i*(width+addr+registerAlign):][:width+addr+registerAlign]
		id := ""
		if s.Port.Affinity > 0 {
			id = numberBytes(endpointNumber(group[i].Address))
			m.put(f.Family, setChoices, Element{Key: k, Data: id})
		} else {
			m.put(f.Family, setBackends, Element{Key: k, Data: e[width:]})
		}
		if seen[i] {
			continue
		}
		seen[i] = true
		if s.Port.Affinity > 0 {
			m.put(f.Family, setBackends, Element{Key: to + id, Data: e[width:]})
		}
		m.put(f.Family, setEndpoints, Element{Key: e[:width]})
	}
	return len(slots)
}

// slotsOf are the endpoints that numbers stand for: each as often as its weight says.
func slotsOf(p *service.Port, group []plan.Backend) []int {
	equal, each := p.Algorithm == service.RoundRobin || p.Algorithm == "", true
	weights, slots := make([]uint32, len(group)), make([]int, len(group))
	for i, e := range group {
		if weights[i] = e.Weight; equal {
			weights[i] = min(e.Weight, 1)
		}
		slots[i], each = i, each && weights[i] == 1
	}
	if each {
		return slots // as almost always
	}
	return lb.Slots(weights, lb.SlotLimit)
}

// endpointNumber is an endpoint's number where clients stay with it: the same as long as
// the endpoint is there, whatever others come and go.
func endpointNumber(a netip.AddrPort) uint32 {
	h := fnv.New32a()
	_, _ = h.Write(a.Addr().AsSlice())
	_, _ = h.Write([]byte{byte(a.Port() >> 8), byte(a.Port())})
	return h.Sum32() | 1<<31
}

// addSteering adds what decides who gets a service's new connections.
func (m *members) addSteering(s *plan.Service) {
	if s == nil {
		return
	}
	m.addClusterIPs(s)
	for i := range s.Frontends {
		m.addSteered(s, &s.Frontends[i])
	}
	if s.Kernel == plan.None || !s.Leaving {
		return
	}
	for i := range s.Endpoints {
		if e := &s.Endpoints[i]; e.Leaves() {
			m.put(service.FamilyOf(e.Address.Addr()), setLeaving, Element{Key: destination(e.Address.Addr(), s.Port.Protocol, e.Address.Port())})
		}
	}
}

// addClusterIPs adds a service port's cluster IPs, and where another proxy serves it.
func (m *members) addClusterIPs(s *plan.Service) {
	for _, a := range s.Port.ClusterIPs {
		m.put(service.FamilyOf(a), setClusterIP, Element{Key: bytesOf(a)})
	}
	for _, at := range s.Left() {
		m.put(service.FamilyOf(at.Addr()), setLeft, Element{Key: destination(at.Addr(), s.Port.Protocol, at.Port())})
	}
}

func (m *members) addSteered(s *plan.Service, f *plan.Frontend) {
	at, port := addressOf(f), f.Address.Port()
	e := Element{Key: destination(at, f.Protocol, port)}
	switch f.Verdict {
	case plan.Reject:
		m.put(f.Family, setRefused, Element{Key: e.Key, Verdict: codeGoto, Chain: chainReject, Comment: s.Port.Key.String()})
	case plan.Drop:
		m.put(f.Family, setRefused, Element{Key: e.Key, Verdict: codeGoto, Chain: chainElsewhere, Comment: s.Port.Key.String()})
	}
	if s.DataPlane == plan.Userspace && f.Verdict == plan.Forward {
		m.put(f.Family, setUserspace, e)
	}
	if f.Kind == plan.NodePort {
		if s.Serves(f) && slices.Contains(userProtocols[:], f.Protocol) {
			m.put(f.Family, setLoopback, Element{Key: protocolBytes(f.Protocol) + portBytes(port)})
		}
		return
	}
	var allowed []Element
	for _, r := range f.SourceRanges {
		if service.FamilyOf(r.Addr()) != f.Family {
			continue
		}
		if r.Bits() == 0 {
			return // a range of every address is none
		}
		first := Element{Key: e.Key + bytesOf(r.Masked().Addr())}
		if !r.IsSingleIP() {
			first.End = e.Key + bytesOf(lastOf(r))
		}
		allowed = append(allowed, first)
	}
	if len(f.SourceRanges) == 0 {
		return
	}
	m.put(f.Family, setLimited, e)
	for _, e := range outermost(allowed) {
		m.put(f.Family, setAllowed, e)
	}
}

// outermost leaves out ranges that lie within others, which the kernel doesn't take.
func outermost(all []Element) []Element {
	slices.SortFunc(all, func(a, b Element) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(cmp.Or(b.End, b.Key), cmp.Or(a.End, a.Key)))
	})
	var out []Element
	for _, e := range all {
		if n := len(out); n > 0 && cmp.Or(e.End, e.Key) <= cmp.Or(out[n-1].End, out[n-1].Key) {
			continue
		}
		out = append(out, e)
	}
	return out
}
