package compare

import (
	"net/netip"
	"strings"
	"testing"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

const dstNAT = 1 << 5 // IPS_DST_NAT

func flow(p service.Protocol, client, dst, replySrc string, status uint32) conntrack.Flow {
	return conntrack.Flow{
		Protocol: p, Status: status,
		OrigSrc: netip.MustParseAddrPort(client), OrigDst: netip.MustParseAddrPort(dst),
		ReplySrc: netip.MustParseAddrPort(replySrc), ReplyDst: netip.MustParseAddrPort(client),
	}
}

// The table is complete: every plane is expected once of every kind of flow.
func TestCheckCarried(t *testing.T) {
	const client, address = "10.1.0.2:40000", "10.96.0.10:9103"
	flows := map[plan.DataPlane]conntrack.Flow{
		Direct:         flow(service.TCP, client, address, address, 0),
		plan.Userspace: flow(service.TCP, client, address, "10.1.0.1:45000", dstNAT),
		plan.IPTables:  flow(service.TCP, client, address, "10.2.0.3:9103", dstNAT),
		plan.IPVS:      flow(service.TCP, client, address, "10.2.0.3:9103", 0),
		plan.NFTables:  flow(service.TCP, client, address, "10.2.0.3:9103", dstNAT),
	}
	witness := []load.Witness{{Client: netip.MustParseAddrPort(client), Target: netip.MustParseAddrPort(address)}}
	for _, went := range Planes {
		for _, should := range Planes {
			err := checkCarried(should, load.Short, witness, []conntrack.Flow{flows[went]})
			is := shown(went)
			if is == shown(should) && err != nil || is != shown(should) && (err == nil || !strings.Contains(err.Error(), "went through "+string(is))) {
				t.Errorf("a flow that went through %s and should through %s: %v", went, should, err)
			}
		}
	}
}

func TestCheckCarriedNeedsEvidence(t *testing.T) {
	const client, address = "10.1.0.2:40000", "10.96.0.10:9103"
	witness := []load.Witness{{Client: netip.MustParseAddrPort(client), Target: netip.MustParseAddrPort(address)}}
	other := []conntrack.Flow{flow(service.UDP, client, address, "10.2.0.3:9103", dstNAT)}
	for _, tt := range []struct {
		name      string
		plane     plan.DataPlane
		kind      load.Kind
		witnesses []load.Witness
		ok        bool
	}{
		{"no witness", plan.IPTables, load.Short, nil, false},
		{"no witness of direct routing either", Direct, load.Short, nil, false},
		{"the table doesn't know it", plan.IPTables, load.Short, witness, false},
		{"what isn't tracked wasn't rewritten", Direct, load.Short, witness, true},
		{"the protocol counts", plan.IPTables, load.Session, witness, true},
	} {
		if err := checkCarried(tt.plane, tt.kind, tt.witnesses, other); (err == nil) != tt.ok {
			t.Errorf("%s: %v, want it accepted: %v", tt.name, err, tt.ok)
		}
	}
}
