package ipvs_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// affinityWorld is a client on host 1, an endpoint each on hosts 2 and 3, and for
// both families a service at two addresses.
func affinityWorld(t *testing.T) (*kerneltest.Network, *host, []kernel.Virtual) {
	t.Helper()
	n, h := drainWorld(t)
	web := service.Key{Name: "web", Protocol: service.TCP}
	var virtuals []kernel.Virtual
	for _, f := range service.Families {
		for _, port := range []string{"80", "81"} {
			x := of[f]
			v := virtual(service.TCP, strings.TrimSuffix(x.vip, "80")+port, x.two, x.three)
			v.Persistence, v.Owner = 3600, web
			virtuals = append(virtuals, v)
		}
	}
	h.bring(ruleset(virtuals...))
	return n, h, virtuals
}

// TestReadAffinity: a client that IPVS keeps is read with its endpoint, of every virtual server that it has come to.
func TestReadAffinity(t *testing.T) {
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			n, h, virtuals := affinityWorld(t)
			client := n.Address(f, 1)
			var want []kernel.Client
			for _, v := range virtuals {
				if service.FamilyOf(v.Address.Addr()) != f {
					continue
				}
				at := of[f].two
				if hold(t, n, v.Address.String()).ask() == "three" {
					at = of[f].three
				}
				want = append(want, kernel.Client{Address: client, Endpoint: netip.MustParseAddrPort(at)})
			}
			read, err := ipvs.ReadAffinity(virtuals)
			h.must(err)
			clients := read[virtuals[0].Owner]
			if len(read) != 1 || len(clients) != len(want) {
				t.Fatalf("read %v, want %v", read, want)
			}
			for _, c := range clients {
				if !slices.ContainsFunc(want, func(w kernel.Client) bool { return w.Address == c.Address && w.Endpoint == c.Endpoint }) || c.Remaining < 3500*time.Second || c.Remaining > 3600*time.Second {
					t.Errorf("read %+v, want one of %v, with an hour left", c, want)
				}
			}
		})
	}
}
