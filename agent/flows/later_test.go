package flows

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// dnsPlan has a UDP service on dnsAddress with endpoints.
func dnsPlan(d plan.DataPlane, endpoints ...string) *plan.Plan {
	s := &plan.Service{
		Port:      &service.Port{Key: service.Key{Namespace: "shop", Name: "dns", Protocol: service.UDP}},
		DataPlane: d,
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Address: dnsAddress, Protocol: service.UDP, Verdict: plan.Forward}},
	}
	for _, e := range endpoints {
		s.Endpoints = append(s.Endpoints, plan.Endpoint{
			Endpoint: &service.Endpoint{Address: netip.MustParseAddrPort(e), Ready: true, Serving: true}, Usable: true,
		})
	}
	return &plan.Plan{Services: []*plan.Service{s}}
}

var dnsAddress = netip.MustParseAddrPort("10.96.0.10:53")

// An entry that began by a plan which came since a clean-up began, or is just coming, is
// left alone; one that is stale by this plan too isn't.
func TestLaterPlansKeepTheirEntries(t *testing.T) {
	const one, two, three, listener = "10.2.0.2:53", "10.2.0.3:53", "10.2.0.4:53", "10.1.0.1:10250"
	for _, tt := range []struct {
		name             string
		old, now, coming *plan.Plan
		want             []string
	}{
		{"nothing comes", dnsPlan(plan.IPTables, one), dnsPlan(plan.IPTables, two), nil, []string{one, three, listener}},
		{"an endpoint comes", dnsPlan(plan.IPTables, one), dnsPlan(plan.IPTables, two), dnsPlan(plan.IPTables, two, three), []string{one, listener}},
		{"an endpoint goes", dnsPlan(plan.IPTables, one), dnsPlan(plan.IPTables, two), dnsPlan(plan.IPTables, three), []string{one, listener}},
		{"it moves", dnsPlan(plan.IPTables, one), dnsPlan(plan.IPTables, two), dnsPlan(plan.Userspace, two), []string{one, three}},
		{"the service comes back", dnsPlan(plan.IPTables, one), &plan.Plan{}, dnsPlan(plan.Userspace, one), nil},
		{"and another endpoint of it", dnsPlan(plan.IPTables, one, two), &plan.Plan{}, dnsPlan(plan.IPTables, two), []string{one, listener}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &StaleCleanup{Config: Config{Plan: func() *plan.Plan { return tt.now }}}
			s.Coming(tt.coming)
			local := netip.MustParseAddrPort(listener)
			c := conntrack.StaleConfig{Listeners: []uint16{local.Port()}, Local: func(a netip.Addr) bool { return a == local.Addr() }}
			var flows []conntrack.Flow
			for i, to := range []string{one, two, three, listener} {
				client := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), 5000+uint16(i))
				flows = append(flows, conntrack.Flow{
					Protocol: service.UDP, OrigSrc: client, OrigDst: dnsAddress, ReplySrc: netip.MustParseAddrPort(to), ReplyDst: client, Status: seenReply,
				})
			}
			var got []string
			for _, f := range staleByAll(flows, tt.old, s.plansSince(tt.now), c) {
				got = append(got, f.ReplySrc.String())
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("deleted (-want +got):\n%s", diff)
			}
		})
	}
}

// seenReply is IPS_SEEN_REPLY of linux/netfilter/nf_conntrack_common.h.
const seenReply = 1 << 1
