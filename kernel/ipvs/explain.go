package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Explainer implements [kernel.Explainer] for virtual servers.
type Explainer struct{}

// counted is a virtual server with its counters; its real servers are in the kernel's order,
// which decides ties.
type counted struct {
	kernel.Virtual
	packets, bytes uint64
	reals          []countedReal
}

type countedReal struct {
	kernel.Real
	packets, bytes   uint64 // from clients
	active, inactive int    // connections
}

// read reads the virtual server at an address, kproxy's or another's; nil if there is none.
func read(p service.Protocol, at netip.AddrPort) (*counted, error) {
	if !Loaded() {
		return nil, nil
	}
	t, err := OpenTable()
	if errors.Is(err, kernel.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer t.Close()
	found, err := t.services([]kernel.Virtual{{Protocol: p, Address: at}})
	if len(found) == 0 || err != nil {
		return nil, err
	}
	s := found[0]
	destinations, err := t.handle.GetDestinations(s)
	if err != nil {
		return nil, fmt.Errorf("list real servers of %s %s: %w", p, at, classify(err))
	}
	v, _ := virtualOf(s)
	out := &counted{Virtual: v, packets: uint64(s.Stats.PacketsIn), bytes: s.Stats.BytesIn}
	for _, d := range destinations {
		out.reals = append(out.reals, countedReal{
			Real: realOf(d), packets: uint64(d.Stats.PacketsIn), bytes: d.Stats.BytesIn, active: d.ActiveConnections, inactive: d.InactiveConnections,
		})
	}
	return out, nil
}

// Explain implements [kernel.Explainer].
func (Explainer) Explain(p service.Protocol, at netip.AddrPort, client netip.Addr) (*kernel.Balancer, error) {
	v, err := read(p, at)
	if v == nil || err != nil {
		return nil, err
	}
	var clients []kernel.Client
	note := ""
	if v.Persistence > 0 {
		all, err := ReadAffinity([]kernel.Virtual{v.Virtual})
		if err != nil {
			note = "which clients stay with which real server can't be read: " + err.Error()
		}
		clients = all[v.Owner]
	}
	b := v.balancer(clients, client)
	b.Note = note
	return b, nil
}

// balancer says how likely each real server gets a client's next connection, given the clients
// that stay with one. What goes by the fewest connections is certain as of now; hashes of the
// client's address are the kernel's to compute, so there shares are those of all clients.
func (v *counted) balancer(clients []kernel.Client, client netip.Addr) *kernel.Balancer {
	text := fmt.Sprintf("%s %s %s", strings.ToUpper(v.Protocol.String()), v.Address, v.Scheduler)
	if v.Persistence > 0 {
		text += fmt.Sprintf(" persistent %d", v.Persistence)
	}
	b := &kernel.Balancer{Plane: plan.IPVS, Name: "IPVS", Text: text, Packets: v.packets, Bytes: v.bytes}
	weight, why := func(r *countedReal) float64 { return float64(r.Weight) }, ""
	switch v.Scheduler {
	case "rr":
		weight, why = func(r *countedReal) float64 { return float64(min(1, r.Weight)) }, "takes turns with the others"
	case "wrr":
		why = "takes turns by weight"
	case "sh", "dh", "mh":
		why = "the scheduler " + v.Scheduler + " always takes the same one for a client; which one only the kernel knows, so this is its share of all clients"
	case "lc", "wlc", "sed", "nq":
		weight, why = only(v.leastLoaded()), "it has the fewest connections now ("+v.Scheduler+")"
	default:
		why = "the scheduler " + v.Scheduler + " decides by more than weights; this is its share by weight"
	}
	if stays := v.stays(clients, client); stays != nil {
		weight, why = only(stays), "the client stays with it (persistence)"
	}
	sum := 0.0
	for i := range v.reals {
		sum += weight(&v.reals[i])
	}
	for i := range v.reals {
		r := &v.reals[i]
		t := kernel.BalancerTarget{
			Address: r.Address, Text: fmt.Sprintf("-> %s Masq %d %d %d", r.Address, r.Weight, r.active, r.inactive), Weight: r.Weight, Packets: r.packets, Bytes: r.bytes,
		}
		if w := weight(r); w > 0 {
			t.Share, t.Why = w/sum, why
		}
		b.Targets = append(b.Targets, t)
	}
	return b
}

// only gives one real server all connections.
func only(one *countedReal) func(*countedReal) float64 {
	return func(r *countedReal) float64 {
		if r == one {
			return 1
		}
		return 0
	}
}

// stays returns the real server that a client stays with; nil if there is none. Where that
// is gone or has weight 0, the kernel chooses another one (ip_vs_check_template in
// net/netfilter/ipvs/ip_vs_conn.c, with expire_quiescent_template as in [Sysctls]).
func (v *counted) stays(clients []kernel.Client, client netip.Addr) *countedReal {
	for _, c := range clients {
		if c.Address != client {
			continue
		}
		if i := slices.IndexFunc(v.reals, func(r countedReal) bool { return r.Address == c.Endpoint && r.Weight > 0 }); i >= 0 {
			return &v.reals[i]
		}
	}
	return nil
}

// leastLoaded returns the real server with the least load, the first of those alike, as
// ip_vs_lc.c, ip_vs_wlc.c, ip_vs_sed.c and ip_vs_nq.c in net/netfilter/ipvs do; nil if none
// has a weight.
func (v *counted) leastLoaded() (best *countedReal) {
	var bestLoad, bestWeight int64
	for i := range v.reals {
		r := &v.reals[i]
		w, load := int64(r.Weight), int64(r.active)+1
		if w == 0 {
			continue
		}
		if v.Scheduler == "lc" || v.Scheduler == "wlc" {
			load = int64(r.active)<<8 + int64(r.inactive)
		}
		if v.Scheduler == "lc" {
			w = 1
		}
		if v.Scheduler == "nq" && r.active == 0 {
			return r
		}
		if best == nil || load*bestWeight < bestLoad*w {
			best, bestLoad, bestWeight = r, load, w
		}
	}
	return best
}

// Compare implements [kernel.Explainer].
func (Explainer) Compare(want *kernel.Ruleset, p service.Protocol, at netip.AddrPort) ([]kernel.Mismatch, error) {
	planned, ok := want.Virtual(p, at)
	if !ok {
		return nil, nil
	}
	found, err := read(p, at)
	if err != nil {
		return nil, err
	}
	return compare(&planned, found), nil
}

func compare(planned *kernel.Virtual, found *counted) (out []kernel.Mismatch) {
	name := fmt.Sprintf("virtual server %s %s", planned.Protocol, planned.Address)
	if found == nil {
		return []kernel.Mismatch{{Object: name, Planned: "there", Kernel: "missing"}}
	}
	differ := func(object, planned, found string) {
		if planned != found {
			out = append(out, kernel.Mismatch{Object: object, Planned: planned, Kernel: found})
		}
	}
	differ("scheduler of "+name, planned.Scheduler, found.Scheduler)
	differ("persistence of "+name, fmt.Sprint(planned.Persistence, " s"), fmt.Sprint(found.Persistence, " s"))
	weights := map[netip.AddrPort]string{}
	for _, r := range found.reals {
		weights[r.Address] = fmt.Sprint("weight ", r.Weight)
	}
	for _, r := range planned.Reals {
		differ("real server "+r.Address.String()+" of "+name, fmt.Sprint("weight ", r.Weight), cmp.Or(weights[r.Address], "missing"))
		delete(weights, r.Address)
	}
	for _, r := range found.reals {
		if weights[r.Address] != "" && r.Weight > 0 { // what drains has weight 0
			differ("real server "+r.Address.String()+" of "+name, "not there", weights[r.Address])
		}
	}
	return out
}
