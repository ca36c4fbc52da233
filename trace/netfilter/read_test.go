package netfilter_test

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/trace/netfilter"
)

// run runs a script in the test's network namespace.
func run(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// read reads what the test's network namespace has.
func read(t *testing.T, f service.Family, variant kernel.Variant, host netfilter.Host) *netfilter.Tables {
	t.Helper()
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sets.Close)
	c := netfilter.DefaultConfig()
	c.Variant, c.Sets, c.Host = variant, sets, host
	tables, err := netfilter.Read(context.Background(), c, f)
	if err != nil {
		t.Fatal(err)
	}
	return tables
}

func bases(t *netfilter.Tables) string {
	var out []string
	for _, b := range t.Bases {
		if b.Rules > 0 || b.Policy != netfilter.Accept {
			out = append(out, fmt.Sprintf("%s %d %s %s %s %s", b.Hook, b.Priority, b.Source, b.Table, b.Chain, b.Policy))
		}
	}
	return strings.Join(out, "\n")
}

func TestReadEverySource(t *testing.T) {
	kerneltest.Namespace(t)
	run(t, `
iptables-nft -A INPUT -p tcp --dport 22 -j ACCEPT
iptables-nft -t mangle -A PREROUTING -j MARK --set-mark 1
iptables-legacy -P INPUT DROP
ip6tables-nft -A FORWARD -j DROP
nft 'add table inet x; add chain inet x y { type filter hook input priority -5; policy drop; }'
nft 'add table ip nat; add chain ip nat prerouting { type nat hook prerouting priority -90; policy accept; }'
nft 'add rule ip nat prerouting tcp dport 99 dnat to 1.2.3.4:80'
nft 'add table bridge b; add chain bridge b c { type filter hook forward priority 0; policy drop; }'`)
	want := `FORWARD 0 nftables bridge b c drop
INPUT -5 nftables inet x y drop
INPUT 0 iptables-nft filter INPUT accept
INPUT 0 iptables-legacy filter INPUT drop
PREROUTING -150 iptables-nft mangle PREROUTING accept
PREROUTING -90 nftables ip nat prerouting accept`
	for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy(), kernel.DefaultVariant()} {
		tables := read(t, service.IPv4, v, nil)
		if got := bases(tables); got != want {
			t.Errorf("variant %q: base chains are\n%s\nwant\n%s", v.Name, got, want)
		}
		if len(tables.Notes) != 0 {
			t.Errorf("notes are %q", tables.Notes)
		}
	}
	w := read(t, service.IPv4, kernel.VariantNFT(), nil).Walk(netfilter.NewPacket(service.TCP, ap("192.0.2.1:40000"), ap("192.0.2.2:22"), "eth0"), netfilter.Input, netfilter.Whole)
	if w.Verdict() != netfilter.Drop || w.Steps[w.Outcomes[0].By].Table != "inet x" {
		t.Errorf("walk: %+v", w)
	}
}

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// without is a host that lacks a program.
type without struct{ program string }

func (w without) Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	if strings.HasPrefix(program, w.program) {
		return nil, &kernel.ExecError{Program: program, Kind: kernel.ErrNoProgram, Stderr: "not in PATH"}
	}
	return kernel.Exec{}.Run(ctx, stdin, program, args...)
}

// TestReadNeedsNoNFT: rules of nftables are read from the kernel, without the program nft.
func TestReadNeedsNoNFT(t *testing.T) {
	kerneltest.Namespace(t)
	run(t, `
iptables-nft -A INPUT -p tcp --dport 22 -j ACCEPT
nft 'add table inet x; add chain inet x y { type filter hook input priority -5; policy accept; }; add rule inet x y tcp dport 23 drop'
nft 'add table inet z; add chain inet z y { type filter hook forward priority 5; policy drop; }'
nft 'add table ip6 z; add chain ip6 z y { type filter hook forward priority 5; policy drop; }'
ip link add d0 type veth peer name d1
nft 'add table netdev n; add chain netdev n i { type filter hook ingress device d0 priority 0; policy drop; }'`)
	c := netfilter.DefaultConfig()
	c.Variant, c.Runner = kernel.VariantNFT(), without{"nft"}
	tables, err := netfilter.Read(context.Background(), c, service.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	want := `FORWARD 5 nftables inet z y drop
INGRESS 0 nftables netdev n i drop
INPUT -5 nftables inet x y accept
INPUT 0 iptables-nft filter INPUT accept`
	if got := bases(tables); got != want {
		t.Errorf("base chains are\n%s\nwant\n%s", got, want)
	}
	for _, c := range []struct {
		hook    netfilter.Hook
		in      string
		verdict netfilter.Verdict
	}{
		{netfilter.Input, "d1", netfilter.Accept},
		{netfilter.Forward, "d1", netfilter.Drop},
		{netfilter.Prerouting, "d0", netfilter.Drop},
		{netfilter.Prerouting, "d1", netfilter.Accept},
	} {
		w := tables.Walk(netfilter.NewPacket(service.TCP, ap("192.0.2.1:40000"), ap("192.0.2.2:22"), c.in), c.hook, netfilter.Whole)
		if w.Verdict() != c.verdict || !w.Outcomes[0].Certain {
			t.Errorf("%s by %q: %+v", c.hook, c.in, w.Outcomes)
		}
	}
}

// TestReadWithoutAVariant: a variant that isn't installed has no rules.
func TestReadWithoutAVariant(t *testing.T) {
	kerneltest.Namespace(t)
	run(t, "iptables-nft -A INPUT -j DROP")
	c := netfilter.DefaultConfig()
	c.Variant, c.Runner = kernel.VariantNFT(), without{"iptables-legacy"}
	tables, err := netfilter.Read(context.Background(), c, service.IPv4)
	if err != nil || len(tables.Notes) > 0 || bases(tables) != "INPUT 0 iptables-nft filter INPUT accept" {
		t.Errorf("%v, %+v", err, tables)
	}
	// The nft variant's rules are read from the kernel where it isn't installed, and those of the legacy
	// one are missed.
	for _, missing := range []string{"iptables-nft", "iptables"} {
		for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy()} {
			c.Variant, c.Runner = v, without{missing}
			tables, err = netfilter.Read(context.Background(), c, service.IPv4)
			if err != nil || len(tables.Notes) > 0 || bases(tables) != "INPUT 0 nftables ip filter INPUT accept" {
				t.Errorf("without %s: %v, %q, %s", missing, err, tables.Notes, bases(tables))
			}
		}
	}
	run(t, "iptables-legacy -A INPUT -j DROP")
	if tables, err = netfilter.Read(context.Background(), c, service.IPv4); err != nil || len(tables.Notes) != 1 || !strings.Contains(tables.Notes[0], "iptables-legacy") {
		t.Errorf("%v, notes %q", err, tables.Notes)
	}
}

// TestWayBack: by which interface a packet back leaves isn't known where it is known only whether
// that is the one that this packet came in on, nor where a mark may route it elsewhere.
func TestWayBack(t *testing.T) {
	for _, c := range []struct {
		rule string
		mark uint32
		want netfilter.Verdict
	}{
		{"fib saddr . iif oif exists", 1, netfilter.Drop}, {"fib saddr . iif oif missing", 1, netfilter.Accept}, {"fib saddr oif lo", 0, netfilter.Unknown},
		{"fib saddr . mark . iif oif missing", 0, netfilter.Accept}, {"fib saddr . mark . iif oif missing", 1, netfilter.Unknown},
	} {
		kerneltest.Namespace(t)
		run(t, "nft 'add table ip t; add chain ip t c { type filter hook prerouting priority 0; }; add rule ip t c "+c.rule+" drop'")
		p := netfilter.NewPacket(service.TCP, ap("10.1.0.2:40000"), ap("10.2.0.2:80"), "eth0")
		p.Reversed, p.Mark = netfilter.Yes, c.mark
		if got := read(t, service.IPv4, kernel.VariantNFT(), nil).Walk(p, netfilter.Prerouting, netfilter.Whole).Verdict(); got != c.want {
			t.Errorf("%s, mark %d: %s, want %s", c.rule, c.mark, got, c.want)
		}
	}
}
