package netfilter_test

import (
	"fmt"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/trace/netfilter"
)

// saved returns what iptables-save would print of n services with three endpoints.
func saved(n int) string {
	r := iptables.Render(kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, 3)...), options())
	var b strings.Builder
	for _, table := range []string{"filter", "mangle", "nat"} {
		fmt.Fprintf(&b, "*%s\n:PREROUTING ACCEPT [1:60]\n:INPUT ACCEPT [1:60]\n:FORWARD ACCEPT [1:60]\n:OUTPUT ACCEPT [1:60]\n:POSTROUTING ACCEPT [1:60]\n", table)
		for _, c := range r.Chains[service.IPv4] {
			if c.Table == table {
				fmt.Fprintf(&b, ":%s - [0:0]\n", c.Name)
			}
		}
		for _, j := range r.Jumps[service.IPv4] {
			if j.Table == table {
				fmt.Fprintf(&b, "[3:180] -A %s %s\n", j.From, j.Rule)
			}
		}
		for _, c := range r.Chains[service.IPv4] {
			for _, rule := range c.Rules {
				if c.Table == table {
					fmt.Fprintf(&b, "[3:180] -A %s %s\n", c.Name, rule)
				}
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

// empty is a host whose sets are empty.
type empty struct{}

func (empty) ReadAny(name string) (kernel.AnySet, error) {
	return kernel.AnySet{Name: name, Type: "hash:ip"}, nil
}

func BenchmarkParse(b *testing.B) {
	for _, n := range []int{10, 1000, 10000} {
		text := saved(n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				if _, err := netfilter.Parse(service.IPv4, text, empty{}, knownHost{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkWalk(b *testing.B) {
	for _, n := range []int{10, 1000, 10000} {
		tables, err := netfilter.Parse(service.IPv4, saved(n), empty{}, knownHost{})
		if err != nil {
			b.Fatal(err)
		}
		p := netfilter.NewPacket(service.TCP, ap("192.0.2.9:40000"), ap(kerneltest.Many(n, 3)[n/2].Frontends[0].Address.String()), "eth0")
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				if w := tables.Walk(p, netfilter.Prerouting, netfilter.Whole); len(w.Choices()) != 3 {
					b.Fatalf("%d choices", len(w.Choices()))
				}
			}
		})
	}
}
