package ipvs_test

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
)

const procText = `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
UDP  [fd00:0096:0000:0000:0000:0000:0000:000a]:0035 wrr 
  -> [fd00:0244:0000:0000:0000:0000:0000:0002]:0035      Masq    3      0          7         
TCP  0A60000A:0050 rr persistent 2700000 FFFFFFFF
  -> 0AF40003:1F90      Masq    0      1          2         
  -> 0AF40002:1F90      Masq    1      4          8         
FWM  00000001 rr 
  -> 0AF40009:1F90      Route   1      0          0         
AH   0A60000B:0000 rr 
SCTP 0A60000A:0050 sh ops 
`

func TestParseProc(t *testing.T) {
	a := netip.MustParseAddrPort
	want := []ipvs.Server{
		{Virtual: kernel.Virtual{Protocol: service.TCP, Address: a("10.96.0.10:80"), Scheduler: "rr", Persistence: 1,
			Reals: []kernel.Real{{Address: a("10.244.0.2:8080"), Weight: 1}, {Address: a("10.244.0.3:8080")}}}, Connections: []int{12, 3}},
		{Virtual: kernel.Virtual{Protocol: service.SCTP, Address: a("10.96.0.10:80"), Scheduler: "sh"}},
		{Virtual: kernel.Virtual{Protocol: service.UDP, Address: a("[fd00:96::a]:53"), Scheduler: "wrr",
			Reals: []kernel.Real{{Address: a("[fd00:244::2]:53"), Weight: 3}}}, Connections: []int{7}},
	}
	got, err := ipvs.ParseProc([]byte(procText))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
		t.Errorf("ParseProc (-want +got):\n%s", diff)
	}
}

func TestParseProcOfNothing(t *testing.T) {
	for _, text := range []string{"", strings.Join(strings.SplitAfter(procText, "\n")[:3], "")} {
		if got, err := ipvs.ParseProc([]byte(text)); err != nil || len(got) > 0 {
			t.Errorf("ParseProc(%q) = %v, %v", text, got, err)
		}
	}
}

func TestParseProcRefuses(t *testing.T) {
	head := strings.Join(strings.SplitAfter(procText, "\n")[:3], "")
	for _, line := range []string{"TCP 0A60000A:0050", "TCP 0A60000A rr", "TCP 0A6000:0050 rr", "TCP 0A60000A:Z rr", "TCP [zz]:0050 rr",
		"TCP 0A60000A:0050 rr\n -> 0A60000A:0050 Masq 1 2", "TCP 0A60000A:0050 rr\n -> 0A60000A:0050 Masq 1 2 x"} {
		if got, err := ipvs.ParseProc([]byte(head + line + "\n")); err == nil {
			t.Errorf("ParseProc(%q) = %v, no error", line, got)
		}
	}
}

func FuzzParseProc(f *testing.F) {
	f.Add([]byte(procText))
	f.Fuzz(func(_ *testing.T, text []byte) { _, _ = ipvs.ParseProc(text) })
}

// needsIPVS skips a test of the real kernel where there is no IPVS.
func needsIPVS(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	if err := ipvs.Load(); err != nil {
		t.Skipf("needs IPVS in the kernel: %v", err)
	}
}
