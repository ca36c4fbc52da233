package kernel_test

import (
	"context"
	"errors"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// stores are the kernel's sets and the model of them. Both must behave alike.
var stores = []struct {
	name string
	open func(t *testing.T) kernel.SetStore
}{
	{"kernel", func(t *testing.T) kernel.SetStore {
		kerneltest.Namespace(t)
		s, err := kernel.OpenIPSets()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		return s
	}},
	{"model", func(*testing.T) kernel.SetStore { return kerneltest.NewHost().Sets() }},
}

// onEachStore runs test on the kernel and on the model.
func onEachStore(t *testing.T, test func(t *testing.T, s kernel.SetStore)) {
	for _, store := range stores {
		t.Run(store.name, func(t *testing.T) { test(t, store.open(t)) })
	}
}

var setKinds = []kernel.Set{
	{Name: "KPROXY-A", Type: kernel.HashIP, Entries: []string{"10.0.0.1", "10.0.0.2"}},
	{Name: "KPROXY-B", Type: kernel.HashIP, Family: service.IPv6, Timeout: 60, Entries: []string{"fd00::1", "fd00::2"}},
	{Name: "KPROXY-C", Type: kernel.HashIPPort, Entries: []string{"10.0.0.1,sctp:7", "10.0.0.1,tcp:80", "10.0.0.1,udp:80"}},
	{Name: "KPROXY-D", Type: kernel.HashIPPort, Family: service.IPv6, Entries: []string{"fd00::1,tcp:80"}},
	{Name: "KPROXY-E", Type: kernel.HashIPPortIP, Entries: []string{"10.0.0.1,tcp:80,10.0.0.1"}},
	{Name: "KPROXY-F", Type: kernel.HashIPPortIP, Family: service.IPv6, Entries: []string{"fd00::1,tcp:80,fd00::1"}},
	{Name: "KPROXY-G", Type: kernel.HashIPPortNet, Entries: []string{"10.0.0.1,tcp:80,192.0.2.0/24", "10.0.0.1,tcp:80,192.0.3.1"}},
	{Name: "KPROXY-H", Type: kernel.HashIPPortNet, Family: service.IPv6, Entries: []string{"fd00::1,tcp:80,2001:db8::/32"}},
	{Name: "KPROXY-I", Type: kernel.HashNet, Timeout: 60, Entries: []string{"0.0.0.0/1", "128.0.0.0/1"}},
	{Name: "KPROXY-J", Type: kernel.HashNet, Family: service.IPv6, Timeout: 60, Entries: []string{"8000::/1", "::/1"}},
	{Name: "KPROXY-K", Type: kernel.BitmapPort, Entries: []string{"0", "30000", "65535"}},
}

func TestSetsHoldWhatWasAdded(t *testing.T) {
	onEachStore(t, func(t *testing.T, s kernel.SetStore) {
		for range 2 { // again: creating and adding what exists is no error
			ops := kernel.DiffSets(nil, setKinds)
			if _, err := kernel.ApplySets(context.Background(), s, ops); err != nil {
				t.Fatal(err)
			}
		}
		have, err := kernel.ReadSets(s)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(setKinds, have); diff != "" {
			t.Errorf("ReadSets (-want +got):\n%s", diff)
		}
		for _, set := range setKinds {
			for range 2 { // deleting what is gone is no error
				if err := s.Delete(set, set.Entries...); err != nil {
					t.Errorf("Delete from %s: %v", set.Name, err)
				}
			}
		}
		states, err := s.List(kerneltest.AllEntries)
		if err != nil {
			t.Fatal(err)
		}
		for _, st := range states {
			if st.Count != 0 || len(st.Entries) != 0 {
				t.Errorf("%s still holds %d entries: %v", st.Name, st.Count, st.Entries)
			}
		}
		if _, err := kernel.ApplySets(context.Background(), s, kernel.DiffSets(have, nil)); err != nil {
			t.Fatal(err)
		}
		if left, err := s.List(nil); err != nil || len(left) > 0 {
			t.Errorf("after destroying: %v, %v", left, err)
		}
	})
}

func TestEntriesArePrintedAsIpsetSaves(t *testing.T) {
	kerneltest.Namespace(t)
	s, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := kernel.ApplySets(context.Background(), s, kernel.DiffSets(nil, setKinds)); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ipset", "save", "-sorted").Output()
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, set := range setKinds {
		for _, e := range set.Entries {
			want = append(want, set.Name+" "+e)
		}
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); f[0] == "add" {
			got = append(got, f[1]+" "+f[2])
		}
	}
	if diff := cmp.Diff(want, got, cmpopts.SortSlices(func(a, b string) bool { return a < b })); diff != "" {
		t.Errorf("ipset save (-want +got):\n%s", diff)
	}
}

func TestManyEntriesInOneCall(t *testing.T) {
	onEachStore(t, func(t *testing.T, s kernel.SetStore) {
		set := kernel.Set{Name: "KPROXY-MANY", Type: kernel.HashIPPort, Family: service.IPv6}
		for i := range 70000 { // more than ipset's default, and than one message holds
			a := netip.AddrFrom16([16]byte{0xfd, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)})
			set.Entries = append(set.Entries, a.String()+",tcp:443")
		}
		if err := s.Create(set); err != nil {
			t.Fatal(err)
		}
		if err := s.Add(set, 0, set.Entries...); err != nil {
			t.Fatal(err)
		}
		states, err := s.List(kerneltest.AllEntries)
		if err != nil {
			t.Fatal(err)
		}
		if st := states[0]; st.Count != len(set.Entries) || len(st.Entries) != len(set.Entries) {
			t.Errorf("set has %d entries, listed %d, want %d", st.Count, len(st.Entries), len(set.Entries))
		}
	})
}

func TestSetErrors(t *testing.T) {
	set := kernel.Set{Name: "KPROXY-ERR", Type: kernel.HashIPPort}
	tests := []struct {
		name string
		do   func(s kernel.SetStore) error
		want error // nil: any error
	}{
		{"add to none", func(s kernel.SetStore) error {
			return s.Add(kernel.Set{Name: "KPROXY-NONE", Type: kernel.HashIP}, 0, "10.0.0.1")
		}, kernel.ErrNotFound},
		{"delete from none", func(s kernel.SetStore) error {
			return s.Delete(kernel.Set{Name: "KPROXY-NONE", Type: kernel.HashIP}, "10.0.0.1")
		}, kernel.ErrNotFound},
		{"destroy none", func(s kernel.SetStore) error { return s.Destroy("KPROXY-NONE") }, kernel.ErrNotFound},
		{"another type", func(s kernel.SetStore) error { return s.Create(kernel.Set{Name: set.Name, Type: kernel.HashNet}) }, nil},
		{"another family", func(s kernel.SetStore) error { return s.Add(set, 0, "fd00::1,tcp:80") }, nil},
		{"half an entry", func(s kernel.SetStore) error { return s.Add(set, 0, "10.0.0.1") }, nil},
		{"too much", func(s kernel.SetStore) error { return s.Add(set, 0, "10.0.0.1,tcp:80,10.0.0.1") }, nil},
		{"no port", func(s kernel.SetStore) error { return s.Add(set, 0, "10.0.0.1,tcp:65536") }, nil},
		{"no protocol", func(s kernel.SetStore) error { return s.Add(set, 0, "10.0.0.1,80") }, nil},
		{"somebody else's set", func(s kernel.SetStore) error { return s.Destroy("FOREIGN") }, nil},
		{"long name", func(s kernel.SetStore) error {
			return s.Create(kernel.Set{Name: kernel.Prefix + strings.Repeat("X", 25), Type: kernel.HashIP})
		}, nil},
	}
	onEachStore(t, func(t *testing.T, s kernel.SetStore) {
		if err := s.Create(set); err != nil {
			t.Fatal(err)
		}
		for _, tt := range tests {
			err := tt.do(s)
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("%s: error %v, want %v", tt.name, err, tt.want)
			}
		}
	})
}

func TestAlive(t *testing.T) {
	onEachStore(t, func(t *testing.T, s kernel.SetStore) {
		alive := func() (n int, remaining []uint32) {
			states, err := s.List(kerneltest.AllEntries)
			if err != nil {
				t.Fatal(err)
			}
			for _, st := range states {
				if strings.HasPrefix(st.Name, kernel.SetAlive) {
					n += len(st.Entries)
					remaining = append(remaining, st.Remaining...)
				}
			}
			return n, remaining
		}
		if err := (&steering.Redirects{Store: s}).Alive(time.Second); !errors.Is(err, kernel.ErrNotFound) {
			t.Errorf("heartbeat without sets: %v, want ErrNotFound", err)
		}
		if err := (&steering.Redirects{Store: s}).Dead(); err != nil {
			t.Errorf("Dead without sets: %v", err)
		}
		if _, err := kernel.ApplySets(context.Background(), s, kernel.SetOps{Create: steering.EmptySetsOf(nil)}); err != nil {
			t.Fatal(err)
		}
		if err := (&steering.Redirects{Store: s}).Alive(time.Hour); err != nil {
			t.Fatal(err)
		}
		// A later heartbeat counts, also when it is shorter.
		if err := (&steering.Redirects{Store: s}).Alive(99*time.Second + 1); err != nil {
			t.Fatal(err)
		}
		n, remaining := alive()
		if n != 4 {
			t.Errorf("alive sets hold %d halves of address space, want 4", n)
		}
		for _, r := range remaining {
			if r < 60 || r > 100 {
				t.Errorf("entry lives for %d s, want about 100", r)
			}
		}
		if err := (&steering.Redirects{Store: s}).Dead(); err != nil {
			t.Fatal(err)
		}
		if n, _ := alive(); n != 0 {
			t.Errorf("after Dead %d entries are left", n)
		}
	})
}

func TestAffinityMoves(t *testing.T) {
	key := service.Key{Namespace: "default", Name: "web", Protocol: service.TCP}
	a, b, gone := netip.MustParseAddrPort("10.1.0.1:80"), netip.MustParseAddrPort("[fd01::1]:80"), netip.MustParseAddrPort("10.1.0.9:80")
	c := netip.MustParseAddrPort("10.1.0.2:80")
	clients := []kernel.Client{
		{Address: netip.MustParseAddr("192.0.2.1"), Endpoint: a, Remaining: time.Hour},
		{Address: netip.MustParseAddr("192.0.2.2"), Endpoint: a, Remaining: 2 * time.Hour},
		{Address: netip.MustParseAddr("192.0.2.3"), Endpoint: a, Remaining: 0},
		{Address: netip.MustParseAddr("192.0.2.4"), Endpoint: gone, Remaining: time.Hour},
		{Address: netip.MustParseAddr("2001:db8::1"), Endpoint: b, Remaining: time.Hour},
	}
	want := []kernel.Client{clients[0], clients[1], clients[4]}
	onEachStore(t, func(t *testing.T, s kernel.SetStore) {
		for _, e := range []netip.AddrPort{a, b, c} {
			if err := s.Create(iptables.EndpointAffinity(key, e)); err != nil {
				t.Fatal(err)
			}
		}
		// An earlier stay in the kernel left the first client with another endpoint.
		old := []kernel.Client{{Address: clients[0].Address, Endpoint: c, Remaining: time.Hour}}
		p := &iptables.Plane{Backend: iptables.New(steering.DefaultEnv(s))}
		moving := []kernel.Moving{{Service: kerneltest.Service("web", service.TCP, kerneltest.Endpoints(c.String(), a.String(), b.String(), gone.String()))}}
		for _, seed := range [][]kernel.Client{old, clients} {
			if err := p.SeedAffinity(t.Context(), moving, map[service.Key][]kernel.Client{key: seed}); err != nil {
				t.Fatal(err)
			}
		}
		all, err := p.ReadAffinity(moving)
		if err != nil {
			t.Fatal(err)
		}
		got := all[key]
		about := cmp.Comparer(func(x, y time.Duration) bool { return (x - y).Abs() < time.Minute })
		byAddress := cmpopts.SortSlices(func(x, y kernel.Client) bool { return x.Address.Less(y.Address) })
		if diff := cmp.Diff(want, got, about, byAddress, cmp.Comparer(func(x, y netip.Addr) bool { return x == y }), cmp.Comparer(func(x, y netip.AddrPort) bool { return x == y })); diff != "" {
			t.Errorf("ReadAffinity (-want +got):\n%s", diff)
		}
	})
}

func TestLetRefusals(t *testing.T) {
	onEachStore(t, func(t *testing.T, s kernel.SetStore) {
		four, six := netip.MustParseAddrPort("10.1.0.1:80"), netip.MustParseAddrPort("[fd01::1]:80")
		if err := (&steering.Redirects{Store: s}).LetRefusals(four, time.Second); !errors.Is(err, kernel.ErrNotFound) {
			t.Errorf("without sets: %v, want ErrNotFound", err)
		}
		if _, err := kernel.ApplySets(t.Context(), s, kernel.SetOps{Create: steering.EmptySetsOf(kerneltest.Plan(plan.ModeIPTables))}); err != nil {
			t.Fatal(err)
		}
		for _, e := range []netip.AddrPort{four, six} {
			if err := (&steering.Redirects{Store: s}).LetRefusals(e, 99*time.Second+1); err != nil {
				t.Fatal(err)
			}
		}
		states, err := s.List(kerneltest.AllEntries)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string][]string{}
		var have []kernel.Set
		for _, st := range states {
			have = append(have, st.Set)
			if strings.HasPrefix(st.Name, kernel.SetLet) {
				got[st.Name] = st.Entries
				if st.Remaining[0] < 60 || st.Remaining[0] > 100 {
					t.Errorf("entry lives for %d s, want about 100", st.Remaining[0])
				}
			}
		}
		want := map[string][]string{"KPROXY-LET-4": {"10.1.0.1,tcp:80"}, "KPROXY-LET-6": {"fd01::1,tcp:80"}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("sets (-want +got):\n%s", diff)
		}
		if ops := kernel.DiffSets(have, steering.Sets(kerneltest.Plan(plan.ModeIPTables))); !ops.Empty() {
			t.Errorf("a plan would change them: %+v", ops)
		}
	})
}
