package ipvs

import (
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

var at = netip.MustParseAddrPort

func templateOf(p service.Protocol, client, virtual string) template {
	return template{key{p, at(virtual)}, netip.MustParseAddr(client)}
}

func TestParseTemplates(t *testing.T) {
	const text = `Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP 0A010002 A7C0 0A60000A 0050 0A020003 0834 TIME_WAIT        99
TCP 0A010002 0000 0A60000A 0000 0A020003 0000 ASSURED        3579
TCP 0A010002 0000 0A60000A FFFF 0A020003 FFFF NONE           3570
TCP 0A010002 0000 0A60000A 0050 0A020004 1F90 NONE             42
IP  0A010002 0000 00000001 0000 0A020004 1F90 NONE             42
UDP fd00:0001:0000:0000:0000:0000:0000:0002 AFF6 fd00:0096:0000:0000:0000:0000:0000:000a 0050 fd00:0002:0000:0000:0000:0000:0000:0003 1F90 UDP 99
UDP fd00:0001:0000:0000:0000:0000:0000:0002 0000 fd00:0096:0000:0000:0000:0000:0000:000a 0050 fd00:0002:0000:0000:0000:0000:0000:0003 1F90 ASSURED 3579
`
	want := map[template]binding{
		templateOf(service.TCP, "10.1.0.2", "10.96.0.10:0"):     {at("10.2.0.3:0"), 3579 * time.Second},
		templateOf(service.TCP, "10.1.0.2", "10.96.0.10:80"):    {at("10.2.0.4:8080"), 42 * time.Second},
		templateOf(service.UDP, "fd00:1::2", "[fd00:96::a]:80"): {at("[fd00:2::3]:8080"), 3579 * time.Second},
	}
	got, err := parseTemplates(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b template) bool { return a == b }), cmp.Comparer(func(a, b binding) bool { return a == b })); diff != "" {
		t.Errorf("parseTemplates (-want +got):\n%s", diff)
	}
}

func TestParseTemplatesRefuses(t *testing.T) {
	for _, line := range []string{
		"TCP 0A010002 0000 0A60000A 0050 0A020004 1F90 NONE",
		"TCP 0A01000Z 0000 0A60000A 0050 0A020004 1F90 NONE 42",
		"TCP 0A010002 0000 0A6000 0050 0A020004 1F90 NONE 42",
		"TCP 0A010002 0000 0A60000A 10050 0A020004 1F90 NONE 42",
		"TCP 0A010002 0000 0A60000A 0050 0A020004 1F90 NONE soon",
	} {
		if got, err := parseTemplates(strings.NewReader(line)); err == nil {
			t.Errorf("%q is %v, want an error", line, got)
		}
	}
}

// FuzzParseTemplates takes any text.
func FuzzParseTemplates(f *testing.F) {
	f.Add("TCP 0A010002 0000 0A60000A 0050 0A020004 1F90 ASSURED        3592\n")
	f.Add("UDP fd00::2 0000 fd00::a 0050 fd00::3 1F90 NONE 1")
	f.Fuzz(func(t *testing.T, text string) {
		if got, err := parseTemplates(strings.NewReader(text)); err != nil && got != nil {
			t.Errorf("%v with error %v", got, err)
		}
	})
}

// TestSyncMessage has what ip_vs_sync.c documents.
func TestSyncMessage(t *testing.T) {
	for _, x := range []struct {
		name  string
		seeds []seed
		want  []string
	}{
		{"IPv4", []seed{{templateOf(service.TCP, "10.1.0.2", "10.96.0.10:80"), at("10.2.0.4:8080"), 3600}}, []string{
			"004d002c 01010000", "00060024 00001000 00010000 00501f90 00000000 00000e10 0a010002 0a60000a 0a020004",
		}},
		{"IPv6 and another", []seed{
			{templateOf(service.UDP, "fd00:1::2", "[fd00:96::a]:53"), at("[fd00:2::3]:5353"), 1},
			{templateOf(service.SCTP, "10.1.0.2", "10.96.0.10:80"), at("10.2.0.4:8080"), 10800},
		}, []string{
			"004d0074 02010000", "01110048 00001000 00010000 003514e9 00000000 00000001",
			"fd000001000000000000000000000002 fd00009600000000000000000000000a fd000002000000000000000000000003",
			"00840024 00001000 00010000 00501f90 00000000 00002a30 0a010002 0a60000a 0a020004",
		}},
	} {
		want := strings.ReplaceAll(strings.Join(x.want, ""), " ", "")
		if got := hex.EncodeToString(syncMessage(77, x.seeds)); got != want {
			t.Errorf("%s:\n got %s\nwant %s", x.name, got, want)
		}
	}
}

// TestSeeds: every virtual server of a service gets its clients, as far as it has
// their endpoints.
func TestSeeds(t *testing.T) {
	web, dns := service.Key{Name: "web"}, service.Key{Name: "dns"}
	reals := []kernel.Real{{Address: at("10.2.0.2:8080"), Weight: 1}, {Address: at("10.2.0.3:8080")}}
	virtuals := []kernel.Virtual{
		{Protocol: service.TCP, Address: at("10.96.0.10:80"), Persistence: 60, Reals: reals, Owner: web},
		{Protocol: service.TCP, Address: at("192.0.2.1:80"), Persistence: 60, Reals: reals, Owner: web},
		{Protocol: service.TCP, Address: at("[fd00:96::a]:80"), Persistence: 60, Reals: []kernel.Real{{Address: at("[fd00:2::2]:8080"), Weight: 2}}, Owner: web},
		{Protocol: service.TCP, Address: at("10.96.0.10:21"), Persistence: 60, Reals: reals, Owner: web}, // FTP
		{Protocol: service.TCP, Address: at("10.96.0.11:80"), Reals: reals, Owner: dns},                  // not persistent
	}
	client := func(a, endpoint string) kernel.Client {
		return kernel.Client{Address: netip.MustParseAddr(a), Endpoint: at(endpoint), Remaining: time.Second}
	}
	expired := client("10.1.0.5", "10.2.0.2:8080")
	expired.Remaining = 0
	clients := map[service.Key][]kernel.Client{
		web: {
			client("10.1.0.2", "10.2.0.2:8080"), client("fd00:1::2", "[fd00:2::2]:8080"), expired,
			client("10.1.0.3", "10.2.0.3:8080"), client("10.1.0.4", "10.2.0.9:8080"), // no real server that takes connections
		},
		dns: {client("10.1.0.2", "10.2.0.2:8080")},
	}
	want := []seed{
		{templateOf(service.TCP, "10.1.0.2", "10.96.0.10:80"), at("10.2.0.2:8080"), 60},
		{templateOf(service.TCP, "10.1.0.2", "192.0.2.1:80"), at("10.2.0.2:8080"), 60},
		{templateOf(service.TCP, "fd00:1::2", "[fd00:96::a]:80"), at("[fd00:2::2]:8080"), 60},
	}
	if diff := cmp.Diff(want, seeds(virtuals, clients), cmp.Comparer(func(a, b seed) bool { return a == b })); diff != "" {
		t.Errorf("seeds (-want +got):\n%s", diff)
	}
}
