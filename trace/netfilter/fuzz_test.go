package netfilter_test

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/tools/txtar"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// checkWalk checks what holds of every walk, whatever the rules are.
func checkWalk(t *testing.T, tables *netfilter.Tables) {
	t.Helper()
	for _, h := range []netfilter.Hook{netfilter.Prerouting, netfilter.Input, netfilter.Forward, netfilter.Output, netfilter.Postrouting} {
		p := netfilter.NewPacket(service.TCP, ap("192.0.2.9:40000"), ap("192.0.2.1:80"), "eth0")
		w := tables.Walk(p, h, netfilter.Whole)
		if len(w.Outcomes) == 0 {
			t.Fatal("a packet has no outcome")
		}
		sum, certain := 0.0, true
		for _, o := range w.Outcomes {
			if o.Probability < 0 || o.Probability > 1+1e-9 {
				t.Fatalf("probability %v", o.Probability)
			}
			sum += o.Probability
			certain = certain && o.Certain
			for _, i := range append([]int{o.By, o.Rewrote, o.Masked}, o.Doubts...) {
				if i >= len(w.Steps) {
					t.Fatalf("step %d of %d", i, len(w.Steps))
				}
			}
		}
		if certain && math.Abs(sum-1) > 1e-6 || sum < 1-1e-6 {
			t.Fatalf("probabilities add up to %v, certain: %v", sum, certain)
		}
		w.Choices()
		w.Verdict()
	}
}

func archives(f *testing.F, name string) {
	files, err := filepath.Glob("testdata/walks/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		for _, part := range txtar.Parse(data).Files {
			if part.Name == name {
				f.Add(string(part.Data))
			}
		}
	}
}

// FuzzSave: whatever iptables-save seems to print is read or refused, and a walk
// ends.
func FuzzSave(f *testing.F) {
	archives(f, "ipv4/save")
	f.Add("*filter\n:INPUT ACCEPT [0:0]\n:A - [0:0]\n:B - [0:0]\n-A INPUT -j A\n-A A -j B\n-A A -j B\n-A B -j A\n-A B -m limit -j A\nCOMMIT\n")
	f.Add("*nat\n:PREROUTING ACCEPT [1:2]\n[3:4] -A PREROUTING -m statistic --mode nth --every 3 -j DNAT --to-destination 1.2.3.4-1.2.3.9:1-3\n-A PREROUTING -m set --match-set a src,dst -g X\nCOMMIT\n")
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 4096 {
			return
		}
		tables, err := netfilter.Parse(service.IPv4, text, savedSets("create a hash:ip family inet\nadd a 192.0.2.9\n"), knownHost{})
		if err != nil {
			return
		}
		checkWalk(t, tables)
	})
}
