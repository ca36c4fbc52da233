package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/service"
)

// ownMark is what the rules know kproxy's packets by.
var ownMark = kernel.DefaultMarks().Own()

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

func clientsOf(f service.Family, endpoint string, addresses ...netip.Addr) map[service.Key][]kernel.Client {
	var out []kernel.Client
	for _, a := range addresses {
		out = append(out, kernel.Client{Address: a, Endpoint: netip.MustParseAddrPort(endpoint), Remaining: time.Minute})
	}
	return map[service.Key][]kernel.Client{{Name: "web", Protocol: service.TCP}: out}
}

// TestAffinityMoves: a client comes to the endpoint that it was seeded with, at
// every address, and is read back with it.
func TestAffinityMoves(t *testing.T) {
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			n, h, virtuals := affinityWorld(t)
			client := n.Address(f, 1)
			h.must(ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clientsOf(f, of[f].three, client)))
			h.expect("daemons", "", run(t, "ipvsadm -l --daemon"))
			for _, v := range virtuals {
				if service.FamilyOf(v.Address.Addr()) != f {
					continue
				}
				for range 3 {
					h.expect("at "+v.Address.String(), "three", hold(t, n, v.Address.String()).ask())
				}
			}
			clients, err := ipvs.ReadAffinity(virtuals)
			h.must(err)
			if len(clients) != 1 || len(clients[virtuals[0].Owner]) != 2 {
				t.Fatalf("read %v, want the client at two virtual servers", clients)
			}
			for _, c := range clients[virtuals[0].Owner] {
				if c.Address != client || c.Endpoint.String() != of[f].three || c.Remaining < 3500*time.Second || c.Remaining > 3600*time.Second {
					t.Errorf("read %+v, want it with %s for an hour from now on", c, of[f].three)
				}
			}
		})
	}
}

// TestAffinityReplaces: a client that another data plane has given another
// endpoint goes there, although IPVS remembers the one before.
func TestAffinityReplaces(t *testing.T) {
	n, h, virtuals := affinityWorld(t)
	client, x := n.Address(service.IPv4, 1), of[service.IPv4]
	h.must(ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clientsOf(service.IPv4, x.two, client)))
	h.must(ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clientsOf(service.IPv4, x.three, client)))
	h.expect("after the second time", "three", hold(t, n, x.vip).ask())
	// It has a connection now.
	err := ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clientsOf(service.IPv4, x.two, client))
	if !errors.Is(err, ipvs.ErrOtherReal) || !strings.Contains(err.Error(), "1 clients") {
		t.Errorf("while it has a connection: %v, want 1 of %v", err, ipvs.ErrOtherReal)
	}
	clients, err := ipvs.ReadAffinity(virtuals[:1])
	h.must(err)
	for _, c := range clients[virtuals[0].Owner] {
		if c.Endpoint.String() != x.three || c.Remaining < 3500*time.Second {
			t.Errorf("read %+v, want it with %s, for as long as ever", c, x.three)
		}
	}
}

// TestAffinityOutlastsLoss: that what the daemon is sent is lost for a moment, or late, costs a moment.
func TestAffinityOutlastsLoss(t *testing.T) {
	n, h, virtuals := affinityWorld(t)
	const drop = "INPUT -d %s -j DROP"
	run(t, fmt.Sprintf("iptables -I "+drop+"; (sleep 0.3; iptables -D "+drop+") >/dev/null 2>&1 &", ipvs.SyncGroup.Addr(), ipvs.SyncGroup.Addr()))
	h.must(ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clientsOf(service.IPv4, of[service.IPv4].three, n.Address(service.IPv4, 1))))
	h.expect("the client", "three", hold(t, n, of[service.IPv4].vip).ask())
}

// TestAffinityOfMany: none is lost, however many there are.
func TestAffinityOfMany(t *testing.T) {
	_, h, virtuals := affinityWorld(t)
	const many = 5_000
	var addresses []netip.Addr
	for i := range many {
		addresses = append(addresses, netip.AddrFrom4([4]byte{10, 100 + byte(i>>16), byte(i >> 8), byte(i)}))
	}
	start := time.Now()
	h.must(ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clientsOf(service.IPv4, of[service.IPv4].two, addresses...)))
	t.Logf("%d clients at two virtual servers took %s", many, time.Since(start))
	clients, err := ipvs.ReadAffinity(virtuals)
	h.must(err)
	if n := len(clients[virtuals[0].Owner]); n != 2*many {
		t.Errorf("%d templates, want %d", n, 2*many)
	}
}

// TestAffinityLeavesOthersDaemonsAlone: also where there would be room for both.
func TestAffinityLeavesOthersDaemonsAlone(t *testing.T) {
	n, h, virtuals := affinityWorld(t)
	clients := clientsOf(service.IPv4, of[service.IPv4].two, n.Address(service.IPv4, 1))
	for _, state := range []string{"master", "backup"} {
		run(t, fmt.Sprintf("ipvsadm --start-daemon %s --mcast-interface host1 --syncid 9", state))
		daemons := run(t, "ipvsadm -l --daemon")
		if err := ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clients); !errors.Is(err, ipvs.ErrSyncDaemon) {
			t.Errorf("%s: %v, want %v", state, err, ipvs.ErrSyncDaemon)
		}
		if err := h.table.StopSync(); !errors.Is(err, ipvs.ErrSyncDaemon) {
			t.Errorf("stop the %s: %v, want %v", state, err, ipvs.ErrSyncDaemon)
		}
		h.expect("daemons", daemons, run(t, "ipvsadm -l --daemon"))
		run(t, "ipvsadm --stop-daemon "+state)
	}
	run(t, "sysctl -qw net.ipv4.vs.backup_only=1")
	if err := ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clients); !errors.Is(err, ipvs.ErrSyncDaemon) {
		t.Errorf("backup_only: %v, want %v", err, ipvs.ErrSyncDaemon)
	}
	if got, err := ipvs.ReadAffinity(virtuals); err != nil || len(got) > 0 {
		t.Errorf("read %v, %v, want no client", got, err)
	}
}

// TestAffinityAfterACrash: a daemon that an earlier kproxy left is in nobody's way.
func TestAffinityAfterACrash(t *testing.T) {
	n, h, virtuals := affinityWorld(t)
	left := fmt.Sprintf("ipvsadm --start-daemon backup --mcast-interface lo --syncid 9 --mcast-group %s", ipvs.SyncGroup.Addr())
	run(t, left)
	client := n.Address(service.IPv4, 1)
	h.must(ipvs.SeedAffinity(context.Background(), ownMark, virtuals, clientsOf(service.IPv4, of[service.IPv4].three, client)))
	h.expect("the client", "three", hold(t, n, of[service.IPv4].vip).ask())
	h.expect("daemons", "", run(t, "ipvsadm -l --daemon"))
	run(t, left)
	h.must(h.table.StopSync())
	h.expect("daemons", "", run(t, "ipvsadm -l --daemon"))
}
