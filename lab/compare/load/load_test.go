package load

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Loads on the loopback interface: every kind does what it says, and stays in
// its bounds.
func TestRun(t *testing.T) {
	ready := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		here := func(_ string, f func() error) error { return f() }
		ended <- Serve(ctx, Server{Namespaces: []string{"here"}}, here, func() { close(ready) })
	}()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	for _, k := range Kinds {
		t.Run(string(k), func(t *testing.T) {
			l := Load{
				Kind: k, Targets: []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), k.Port())},
				Workers: 2, Count: 20, Time: 10 * time.Second, FirstPort: 12000,
			}
			if k == Throughput {
				l.Count, l.Time = 2, 50*time.Millisecond
			}
			out, err := Run(ctx, l)
			if err != nil {
				t.Fatal(err)
			}
			if out.Count != l.Count || out.Failed != 0 || out.Seconds <= 0 {
				t.Errorf("%d succeeded and %d failed in %g s (%s), want %d", out.Count, out.Failed, out.Seconds, out.Error, l.Count)
			}
			if (k == Throughput) != (out.Bytes > 0) || (k == Throughput) != (out.Exchange == nil) {
				t.Errorf("%d bytes, exchanges %+v", out.Bytes, out.Exchange)
			}
			if k == Connections && len(out.Witnesses) != 20 || len(out.Witnesses) == 0 {
				t.Errorf("%d witnesses", len(out.Witnesses))
			}
		})
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestRunFails(t *testing.T) {
	closed := netip.MustParseAddrPort("127.0.0.1:1")
	_, err := Run(t.Context(), Load{Kind: Firsts, Targets: []netip.AddrPort{closed}, Workers: 1, Count: 3, Time: time.Second})
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a load to a closed port: %v, want it refused", err)
	}
}

func TestValidate(t *testing.T) {
	err := (&Load{Kind: "x", Workers: 17, Time: time.Hour}).Validate()
	for _, phrase := range []string{`kind "x"`, "no targets", "17 workers", "1h0m0s", "count 0"} {
		if err == nil || !strings.Contains(err.Error(), phrase) {
			t.Errorf("Validate() = %v, want it to say %q", err, phrase)
		}
	}
	sessions := Load{Kind: Sessions, Targets: []netip.AddrPort{{}}, Workers: 1, Count: 1000, Time: time.Second, FirstPort: 65000}
	if err := sessions.Validate(); err == nil {
		t.Error("sessions from more ports than there are: no error")
	}
}

func TestPercentiles(t *testing.T) {
	var d []time.Duration
	for i := range 200 {
		d = append(d, time.Duration(200-i)*time.Microsecond)
	}
	for _, tt := range []struct {
		d    []time.Duration
		want *Percentiles
	}{
		{nil, nil},
		{d[:1], &Percentiles{1, 200, 200, 200}},
		{[]time.Duration{2 * time.Microsecond, time.Microsecond}, &Percentiles{2, 1, 2, 2}},
		{d, &Percentiles{200, 100, 198, 200}},
	} {
		if diff := cmp.Diff(tt.want, PercentilesOf(append([]time.Duration(nil), tt.d...))); diff != "" {
			t.Errorf("percentiles of %d (-want +got):\n%s", len(tt.d), diff)
		}
	}
}
