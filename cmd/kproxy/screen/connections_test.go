package screen

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

func connection(service, client string, plane plan.DataPlane, age float64, bytes uint64) plan.ConnectionStatus {
	return plan.ConnectionStatus{
		Protocol: "tcp", Client: netip.MustParseAddrPort(client), Service: service, Address: netip.MustParseAddrPort("10.96.0.10:80"),
		Endpoint: netip.MustParseAddrPort("10.2.0.2:9000"), DataPlane: plane, AgeSeconds: age, BytesIn: bytes, BytesOut: 3 * bytes,
	}
}

func connectionRows() []plan.ConnectionStatus {
	return []plan.ConnectionStatus{
		connection("default/web:line", "10.1.0.2:40001", plan.Userspace, 75.5, 1536),
		connection("default/web:line", "10.1.0.2:40000", plan.IPVS, 0, 9<<20),
		connection("shop/a-service-with-quite-a-long-name:and-port", "10.1.0.3:50000", plan.IPTables, 3, 10),
		connection("default/api", "[fd00:1::2]:40002", plan.Userspace, 90000, 1),
	}
}

func TestConnectionTable(t *testing.T) {
	rows := connectionRows()
	SortConnections(rows, "service")
	for name, got := range map[string][]string{
		"connections-table.txt":      ConnectionTable(rows, false, 0, Theme{}),
		"connections-table-wide.txt": ConnectionTable(rows, true, 0, Theme{}),
		"connections-table-80.txt":   ConnectionTable(rows, false, 80, Theme{Unicode: true}),
	} {
		compare(t, name, strings.Join(append(got, "", ConnectionSummary(rows)), "\n")+"\n")
	}
}

func TestConnectionSummary(t *testing.T) {
	for n, want := range []string{"no connections", "1 connection, 1 in userspace; 1.5KB in, 4.5KB out", "2 connections: 1 in userspace, 1 in ipvs; 9.0MB in, 27.0MB out"} {
		if got := ConnectionSummary(connectionRows()[:n]); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestSortConnections(t *testing.T) {
	for by, want := range map[string]string{"service": "40002 40000 40001 50000", "bytes": "40000 40001 50000 40002", "age": "40002 40001 50000 40000"} {
		rows := connectionRows()
		SortConnections(rows, by)
		var got []string
		for _, r := range rows {
			got = append(got, fmt.Sprint(r.Client.Port()))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("by %s: %s, want %s", by, got, want)
		}
	}
}

// TestConnectionsScreen: what keys do, and that it fits.
func TestConnectionsScreen(t *testing.T) {
	c := NewConnections(Theme{Unicode: true}, false, "service")
	c.Update(connectionRows(), noon)
	for _, step := range []struct {
		name string
		keys []string
	}{{"start", nil}, {"bytes-wide", []string{"s", "w"}}, {"filter", []string{"/", "w", "e", "b", "enter"}}} {
		for _, k := range step.keys {
			if c.Key(k, noon) {
				t.Fatalf("%s quits", k)
			}
		}
		compare(t, "connections-"+step.name+"-80.txt", strings.Join(c.Render(noon, 80, 10), "\n")+"\n")
	}
	c.Key("p", noon)
	before := c.Render(noon, 80, 10)
	c.Update(nil, noon)
	if diff := cmp.Diff(before, c.Render(noon, 80, 10)); diff != "" {
		t.Errorf("it changes while paused:\n%s", diff)
	}
	c.Key("p", noon)
	c.Key("esc", noon)
	c.Update(connectionRows(), noon)
	c.Fail(errors.New("it has gone"), noon)
	for width := range 120 {
		for _, height := range []int{0, 1, 2, 3, 8, 30} {
			lines := c.Render(noon.Add(time.Minute), width, height)
			if len(lines) > height {
				t.Fatalf("%dx%d: %d lines", width, height, len(lines))
			}
			for _, l := range lines {
				if ansi.StringWidth(l) > width {
					t.Fatalf("%dx%d: %q", width, height, l)
				}
			}
		}
	}
	if !c.Key("q", noon) || !c.Key("ctrl+c", noon) {
		t.Error("q or Ctrl-C doesn't quit")
	}
}

func BenchmarkConnections(b *testing.B) {
	rows := make([]plan.ConnectionStatus, 100_000)
	for i := range rows {
		rows[i] = connectionRows()[i%4]
		rows[i].Client = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), uint16(i))
	}
	c := NewConnections(Theme{Colour: true, Unicode: true}, false, "bytes")
	for b.Loop() {
		c.Update(rows, noon)
		c.Render(noon, 200, 50)
	}
}
