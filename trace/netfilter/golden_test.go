package netfilter_test

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

var update = flag.Bool("update", false, "write the files anew")

// TestWalks walks packets through rules as the kernel's tools printed them. An
// archive has "ipv4/save" or "ipv6/save", of iptables-save -c; "sets", of ipset save; and "packets",
// one a line: hook, protocol, source, destination, and in=, out=, mark=, state=,
// dnat, reversed=. What it meets comes after it, in "walks".
func TestWalks(t *testing.T) {
	files, err := filepath.Glob("testdata/walks/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			parts := map[string]string{}
			for _, f := range a.Files {
				parts[f.Name] = string(f.Data)
			}
			got := walks(t, parts)
			if *update {
				a.Files = append(a.Files[:len(a.Files)-1:len(a.Files)-1], txtar.File{Name: "walks", Data: []byte(got)})
				if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(parts["walks"], got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func walks(t *testing.T, parts map[string]string) string {
	f, save := service.IPv4, parts["ipv4/save"]
	if save == "" {
		f, save = service.IPv6, parts["ipv6/save"]
	}
	tables, err := netfilter.Parse(f, save, savedSets(parts["sets"]), knownHost{})
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for line := range strings.Lines(parts["packets"]) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		p, h := parsePacket(t, line)
		fmt.Fprintf(&b, "%s\n", line)
		printWalk(&b, tables.Walk(p, h, netfilter.Whole))
	}
	return b.String()
}

func parsePacket(t *testing.T, line string) (netfilter.Packet, netfilter.Hook) {
	t.Helper()
	words := strings.Fields(line)
	proto, err := service.ParseProtocol(words[1])
	if err != nil {
		t.Fatal(err)
	}
	p := netfilter.NewPacket(proto, ap(words[2]), ap(words[3]), "")
	for _, w := range words[4:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "in":
			p.In = value
		case "out":
			p.Out = value
		case "mark":
			n, err := strconv.ParseUint(value, 0, 32)
			if err != nil {
				t.Fatal(err)
			}
			p.Mark = uint32(n)
		case "state":
			p.State = netfilter.State(value)
		case "dnat":
			p.DNAT, p.DstDone = true, true
		case "reversed":
			p.Reversed = netfilter.Answer(value)
		default:
			t.Fatalf("%s: what is %s?", line, w)
		}
	}
	return p, netfilter.Hook(words[0])
}

// printWalk prints the steps that don't say no, and all outcomes.
func printWalk(b *strings.Builder, w *netfilter.Walk) {
	for _, s := range w.Steps {
		if s.Matched == netfilter.No {
			continue
		}
		counter := ""
		if s.Packets != nil {
			counter = fmt.Sprintf("[%d] ", *s.Packets)
		}
		fmt.Fprintf(b, "%s%s %s%s: %s", strings.Repeat("  ", s.Depth+1), s.Table, counter, s.Text, s.Matched)
		if s.Matched == netfilter.Chance {
			fmt.Fprintf(b, " %.4f", s.Probability)
		}
		if s.Why != "" {
			fmt.Fprintf(b, " (%s)", s.Why)
		}
		fmt.Fprintln(b)
	}
	for _, o := range w.Outcomes {
		fmt.Fprintf(b, "  = %s", o.Verdict)
		if !o.Certain {
			b.WriteString(" perhaps")
		} else if math.Abs(o.Probability-1) > 1e-9 {
			fmt.Fprintf(b, " %.4f", o.Probability)
		}
		p := o.Packet
		if o.Rewrote >= 0 {
			fmt.Fprintf(b, ", to %s", p.Dst)
		}
		if o.Masked >= 0 {
			fmt.Fprintf(b, ", from %s", p.Src.Addr())
		}
		if p.Mark != 0 || p.ConnMark != 0 {
			fmt.Fprintf(b, ", marks %#x %#x", p.Mark, p.ConnMark)
		}
		fmt.Fprintln(b)
	}
}

// savedSets are sets in the form of ipset save.
type savedSets string

func (s savedSets) ReadAny(name string) (kernel.AnySet, error) {
	out := kernel.AnySet{}
	for line := range strings.Lines(string(s)) {
		w := strings.Fields(line)
		switch {
		case len(w) > 2 && w[0] == "create" && w[1] == name:
			out.Name, out.Type = name, w[2]
			if strings.Contains(line, "family inet6") {
				out.Family = service.IPv6
			}
			out.Timed = strings.Contains(line, "timeout")
			out.MarkMask = math.MaxUint32
		case len(w) > 2 && w[0] == "add" && w[1] == name:
			out.Entries = append(out.Entries, savedEntry(out.Type, w[2:]))
		}
	}
	if out.Name == "" {
		return out, errors.New("no set " + name)
	}
	return out, nil
}

func savedEntry(typ string, words []string) kernel.AnyEntry {
	e, err := kernel.ParseEntry(kernel.SetType(typ), words[0])
	if err != nil {
		panic(err)
	}
	for i, w := range words {
		switch {
		case w == "nomatch":
			e.NoMatch = true
		case w == "timeout" && i+1 < len(words):
			n, _ := strconv.ParseUint(words[i+1], 10, 32)
			e.Remaining = uint32(n)
		}
	}
	return e
}

// knownHost is 192.0.2.1 and 2001:db8::1, on eth0.
type knownHost struct{}

func (knownHost) AddressType(a netip.Addr) (string, error) {
	switch {
	case a.IsLoopback() || a == netip.MustParseAddr("192.0.2.1") || a == netip.MustParseAddr("2001:db8::1"):
		return "LOCAL", nil
	case a.IsMulticast():
		return "MULTICAST", nil
	}
	return "UNICAST", nil
}

func (knownHost) InterfaceAddress(_ string, f service.Family) (netip.Addr, error) {
	return [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}[f], nil
}

func (h knownHost) MasqueradeAddress(out string, dst netip.Addr) (netip.Addr, error) {
	return h.InterfaceAddress(out, service.FamilyOf(dst))
}

func (knownHost) Listens(service.Protocol, netip.AddrPort) (netfilter.Socket, error) {
	return netfilter.Socket{}, nil
}
