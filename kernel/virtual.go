package kernel

import (
	"cmp"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/service"
)

// DummyLink is the link that holds the service addresses which virtual servers
// answer on, so that packets to them are delivered to this node (LOCAL_IN, where
// IPVS picks them up). It is kproxy's, also where another program made it.
const DummyLink = "kproxy0"

// Virtual is a virtual server of IPVS (struct ip_vs_service) with its real
// servers.
type Virtual struct {
	Protocol  service.Protocol
	Address   netip.AddrPort
	Scheduler string // the kernel's name: "rr"
	// SchedFlags are the scheduler's own flags (IP_VS_SVC_F_SCHED1 and so on).
	SchedFlags uint32
	// Persistence is how many seconds a client stays with its real server after
	// its last connection; 0 for not at all.
	Persistence uint32
	Reals       []Real // in order of address
	// Owner is the service port it belongs to; the zero Key where it was read back.
	Owner service.Key
}

// Real is a real server: an endpoint of a virtual server (struct ip_vs_dest).
type Real struct {
	Address netip.AddrPort
	Weight  uint32 // 0 takes no new connection
}

// VirtualChange says what happens to one virtual server. Set comes before Drain,
// so there is always somebody to take a connection.
type VirtualChange struct {
	Virtual // without Reals
	// Settings: the virtual server is to be made, or has other settings now.
	Settings bool
	Set      []Real // to be made, or with another weight now
	// Drain are real servers that aren't wanted any more: they take no new
	// connection and go when those that they have are gone, or when the drain
	// time-out has passed.
	Drain []Real
	// Remove: the virtual server goes as well, when its last real server has gone.
	Remove bool
}

// CompareVirtuals orders virtual servers by address, then protocol.
func CompareVirtuals(a, b Virtual) int {
	return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol))
}

// Virtual returns the virtual server at an address, if r has one.
func (r *Ruleset) Virtual(p service.Protocol, a netip.AddrPort) (Virtual, bool) {
	i, ok := slices.BinarySearchFunc(r.Virtuals, Virtual{Protocol: p, Address: a}, CompareVirtuals)
	if !ok {
		return Virtual{}, false
	}
	return r.Virtuals[i], true
}

// diffVirtuals returns what leads from have to want; both are in order.
func diffVirtuals(have, want []Virtual) []VirtualChange {
	var out []VirtualChange
	for i, j := range service.Merge(len(have), len(want), func(i, j int) int { return CompareVirtuals(have[i], want[j]) }) {
		var c VirtualChange
		switch {
		case j < 0:
			c = VirtualChange{Virtual: have[i], Drain: have[i].Reals, Remove: true}
		case i < 0:
			c = VirtualChange{Virtual: want[j], Settings: true, Set: want[j].Reals}
		case slices.Equal(have[i].Reals, want[j].Reals) && !settingsDiffer(&have[i], &want[j]):
			continue
		default:
			c = changeVirtual(have[i], want[j])
		}
		c.Reals = nil
		if c.Settings || c.Remove || len(c.Set)+len(c.Drain) > 0 {
			out = append(out, c)
		}
	}
	return out
}

func settingsDiffer(have, want *Virtual) bool {
	return have.Scheduler != want.Scheduler || have.SchedFlags != want.SchedFlags || have.Persistence != want.Persistence
}

func changeVirtual(have, want Virtual) VirtualChange {
	c := VirtualChange{Virtual: want, Settings: settingsDiffer(&have, &want)}
	h, w := have.Reals, want.Reals
	for i, j := range service.Merge(len(h), len(w), func(i, j int) int { return h[i].Address.Compare(w[j].Address) }) {
		switch {
		case j < 0:
			c.Drain = append(c.Drain, h[i])
		case i < 0 || h[i].Weight != w[j].Weight:
			c.Set = append(c.Set, w[j])
		}
	}
	return c
}
