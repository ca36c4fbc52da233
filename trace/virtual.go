package trace

import (
	"errors"
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
)

// seeVirtual reads the virtual server at an address back from IPVS; false if
// there is none, or no IPVS.
func seeVirtual(p service.Protocol, a netip.AddrPort) (ipvs.Seen, bool, error) {
	table, err := ipvs.OpenTable()
	if errors.Is(err, kernel.ErrNotFound) {
		return ipvs.Seen{}, false, nil
	}
	if err != nil {
		return ipvs.Seen{}, false, err
	}
	defer table.Close()
	return table.See(p, a)
}

// share is how likely IPVS takes a real server.
type share struct {
	probability float64
	why         string
}

// schedule says how likely a scheduler takes each of the real servers. What goes
// by the fewest connections is certain as of now; hashes of the client's address
// are the kernel's to compute, so there shares are those of all clients.
func schedule(v ipvs.Seen) []share {
	out := make([]share, len(v.Reals))
	switch v.Scheduler {
	case "rr":
		divide(out, v.Reals, func(ipvs.SeenReal) float64 { return 1 }, "takes turns with the others")
	case "wrr":
		divide(out, v.Reals, byWeight, "takes turns by weight")
	case "sh", "dh", "mh":
		divide(out, v.Reals, byWeight, "the scheduler "+v.Scheduler+" always takes the same one for a client; which one only the kernel knows, so this is its share of all clients")
	case "lc", "wlc", "sed", "nq":
		if i := least(v); i >= 0 {
			out[i] = share{1, "it has the fewest connections now (" + v.Scheduler + ")"}
		}
	default:
		divide(out, v.Reals, byWeight, "the scheduler "+v.Scheduler+" decides by more than weights; this is its share by weight")
	}
	return out
}

func byWeight(r ipvs.SeenReal) float64 { return float64(r.Weight) }

func divide(out []share, reals []ipvs.SeenReal, weight func(ipvs.SeenReal) float64, why string) {
	var sum float64
	for _, r := range reals {
		if r.Weight > 0 {
			sum += weight(r)
		}
	}
	for i, r := range reals {
		if r.Weight > 0 {
			out[i] = share{weight(r) / sum, why}
		}
	}
}

// least returns the real server that has least to do, the first of those alike,
// as ip_vs_lc.c, ip_vs_wlc.c, ip_vs_sed.c and ip_vs_nq.c in net/netfilter/ipvs
// do; -1 if none has a weight.
func least(v ipvs.Seen) int {
	best := -1
	var bestLoad, bestWeight int64
	for i, r := range v.Reals {
		w := int64(r.Weight)
		if w == 0 {
			continue
		}
		var load int64
		switch v.Scheduler {
		case "lc", "wlc":
			load = int64(r.Active)<<8 + int64(r.Inactive)
		default:
			load = int64(r.Active) + 1
		}
		if v.Scheduler == "lc" {
			w = 1
		}
		if v.Scheduler == "nq" && r.Active == 0 {
			return i
		}
		if best < 0 || load*bestWeight < bestLoad*w {
			best, bestLoad, bestWeight = i, load, w
		}
	}
	return best
}

// virtualText prints a virtual server as ipvsadm -Ln does.
func virtualText(v ipvs.Seen) string {
	text := fmt.Sprintf("%s %s %s", protocolName(v.Protocol), v.Address, v.Scheduler)
	if v.Persistence > 0 {
		text += fmt.Sprintf(" persistent %d", v.Persistence)
	}
	return text
}

func realText(r ipvs.SeenReal) string {
	return fmt.Sprintf("-> %s Masq %d %d %d", r.Address, r.Weight, r.Active, r.Inactive)
}

func protocolName(p service.Protocol) string {
	return map[service.Protocol]string{service.TCP: "TCP", service.UDP: "UDP", service.SCTP: "SCTP"}[p]
}

// seeAffinity returns the clients that IPVS keeps with real servers of a virtual
// server.
func seeAffinity(v kernel.Virtual) ([]kernel.Client, error) {
	v.Owner = service.Key{}
	all, err := ipvs.ReadAffinity([]kernel.Virtual{v})
	return all[v.Owner], err
}

// persistent returns the real server that the client stays with.
func (t *tracer) persistent(v ipvs.Seen) (netip.AddrPort, bool) {
	if v.Persistence == 0 {
		return netip.AddrPort{}, false
	}
	clients, err := t.sight.affinity(v.Virtual)
	if err != nil {
		t.warn(SeverityWarning, "which clients stay with which real server can't be read: "+err.Error(), "IPVS", "")
	}
	for _, c := range clients {
		if c.Address == t.client.Address {
			return c.Endpoint, true
		}
	}
	return netip.AddrPort{}, false
}
