package ipvs_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// setsOnly is a backend for rules of tests that have none.
type setsOnly struct{ sets kernel.SetStore }

func (s setsOnly) Observe(context.Context) (out kernel.Ruleset, err error) {
	out.Sets, err = kernel.ReadSets(s.sets)
	return out, err
}

func (s setsOnly) Apply(ctx context.Context, ops kernel.Ops) (a kernel.Applied, err error) {
	a.Entries, err = kernel.ApplySets(ctx, s.sets, kernel.SetOps{Create: ops.CreateSets, Add: ops.AddEntries, Del: ops.DelEntries, Destroy: ops.DestroySets})
	return a, err
}

// quiet is a watch of rules where there are none.
type quiet struct{}

func (quiet) Expect(kernel.Ruleset)                   {}
func (quiet) Check(context.Context) ([]string, error) { return nil, nil }
func (quiet) Close()                                  {}

// host is a backend on the real kernel, in the test's network namespace.
type host struct {
	t     testing.TB
	table *ipvs.Netlink
	link  *ipvs.Dummy
	sets  *kernel.IPSets
	now   time.Time // of the backend; real time if zero
	*ipvs.Backend
}

const drainTimeout = time.Minute

// newHost opens a backend in the namespace of the test, which has to be in one
// of its own.
func newHost(t testing.TB) *host {
	t.Helper()
	h := &host{t: t}
	var err error
	if h.table, err = ipvs.OpenTable(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.table.Close)
	if h.link, err = ipvs.OpenLink(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.link.Close)
	if h.sets, err = kernel.OpenIPSets(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.sets.Close)
	h.restart()
	return h
}

// restart goes on with a backend that knows nothing, as after a restart of kproxy.
func (h *host) restart() {
	h.t.Helper()
	h.Backend = ipvs.New(ipvs.Config{
		Rules: setsOnly{h.sets}, Sets: h.sets, Table: h.table, Link: h.link, DrainTimeout: drainTimeout,
		Now: func() time.Time {
			if h.now.IsZero() {
				return time.Now()
			}
			return h.now
		},
	})
}

func (h *host) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// virtual is a virtual server with real servers of weight 1; an address that
// ends in "=0" has weight 0.
func virtual(p service.Protocol, address string, reals ...string) kernel.Virtual {
	v := kernel.Virtual{Protocol: p, Address: netip.MustParseAddrPort(address), Scheduler: "rr", Owner: service.Key{Name: address, Protocol: p}}
	for _, r := range reals {
		a, zero := strings.CutSuffix(r, "=0")
		real := kernel.Real{Address: netip.MustParseAddrPort(a), Weight: 1}
		if zero {
			real.Weight = 0
		}
		v.Reals = append(v.Reals, real)
	}
	slices.SortFunc(v.Reals, func(a, b kernel.Real) int { return a.Address.Compare(b.Address) })
	return v
}

// ruleset returns what a renderer makes of virtual servers, without rules.
func ruleset(virtuals ...kernel.Virtual) kernel.Ruleset {
	out := kernel.Ruleset{Sets: ipvs.Sets(), Virtuals: slices.Clone(virtuals)}
	var endpoints [2]kernel.Set
	for _, f := range service.Families {
		endpoints[f] = kernel.Set{Name: kernel.FamilySet(kernel.SetEndpoint, f), Type: kernel.HashIPPortIP, Family: f}
	}
	for _, v := range virtuals {
		out.Addresses = append(out.Addresses, v.Address.Addr())
		e := &endpoints[service.FamilyOf(v.Address.Addr())]
		for _, r := range v.Reals {
			e.Entries = append(e.Entries, kernel.EndpointEntry(v.Protocol, r.Address))
		}
	}
	for _, e := range endpoints {
		slices.Sort(e.Entries)
		e.Entries = slices.Compact(e.Entries)
		out.Sets = append(out.Sets, e)
	}
	slices.SortFunc(out.Sets, kernel.CompareSets)
	slices.SortFunc(out.Virtuals, kernel.CompareVirtuals)
	slices.SortFunc(out.Addresses, netip.Addr.Compare)
	out.Addresses = slices.Compact(out.Addresses)
	return out
}

// bring brings the kernel to want and returns what failed.
func (h *host) bring(want kernel.Ruleset) map[service.Key]error {
	h.t.Helper()
	have, err := h.Observe(context.Background())
	h.must(err)
	applied, err := h.Apply(context.Background(), kernel.Diff(have, want))
	h.must(err)
	return applied.Failed
}

// drain goes on with what drains, and says how much is left.
func (h *host) drain() int {
	h.t.Helper()
	left, err := h.Drain(context.Background())
	h.must(err)
	return left
}

// table prints the virtual servers, a word each, then their real servers with
// weights.
func (h *host) servers() string {
	h.t.Helper()
	all, err := h.table.List()
	h.must(err)
	var out []string
	for _, s := range all {
		text := s.Protocol.String() + " " + s.Address.String()
		for _, r := range s.Reals {
			text += fmt.Sprintf(" %s=%d", r.Address, r.Weight)
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

// entries prints the entries of a set.
func (h *host) entries(name string) string {
	h.t.Helper()
	states, err := h.sets.List(func(n string) bool { return n == name })
	h.must(err)
	for _, s := range states {
		if s.Name == name {
			return strings.Join(s.Entries, " ")
		}
	}
	return "no set"
}

func (h *host) addresses() string {
	h.t.Helper()
	s, err := h.link.State()
	h.must(err)
	if !s.Exists {
		return "no link"
	}
	var out []string
	for _, a := range s.Addresses {
		out = append(out, a.String())
	}
	return strings.Join(out, " ")
}

func (h *host) expect(what, want, got string) {
	h.t.Helper()
	if want != got {
		h.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// held is a connection that stays open.
type held struct {
	net.Conn
	lines *bufio.Reader
}

// patience is for an emulated machine.
const patience = 20 * time.Second

// hold connects from host 1.
func hold(t *testing.T, n *kerneltest.Network, to string) *held {
	t.Helper()
	var c net.Conn
	var err error
	n.On(1, func() { c, err = net.DialTimeout("tcp", to, patience) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &held{c, bufio.NewReader(c)}
}

// cut ends the connection with a reset, after which IPVS knows it for ten seconds
// more; an orderly end is remembered for two minutes.
func (h *held) cut() {
	_ = h.Conn.(*net.TCPConn).SetLinger(0)
	h.Close()
}

// ask sends a line and returns who answers.
func (h *held) ask() string {
	_ = h.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintln(h, "?"); err != nil {
		return err.Error()
	}
	line, err := h.lines.ReadString('\n')
	if err != nil {
		return err.Error()
	}
	name, _, _ := strings.Cut(line, " ")
	return name
}

// holdAt connects until a connection is answered by the server of a name.
func holdAt(t *testing.T, n *kerneltest.Network, to, name string) *held {
	t.Helper()
	for range 20 {
		h := hold(t, n, to)
		if h.ask() == name {
			return h
		}
		h.cut()
	}
	t.Fatalf("no connection to %s is answered by %s", to, name)
	return nil
}

// needsIPVS skips a test of the real kernel where there is no IPVS.
func needsIPVS(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to make virtual servers")
	}
	if err := ipvs.Load(); err != nil {
		t.Skipf("needs IPVS in the kernel: %v", err)
	}
}
