package netfilter

import (
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/service"
)

// TestZones: the rule that gives a packet a zone of conntrack decides in which one its connection is found later.
func TestZones(t *testing.T) {
	for _, tt := range []struct {
		rule          string
		zone          Zone
		answer, later bool // found, where no rule gives these a zone
	}{
		{"-j CT --zone 5", Zone{ID: 5}, false, false},
		{"-j CT --zone-orig 5", Zone{5, "original"}, true, false},
		{"-j CT --zone-reply 5", Zone{5, "reply"}, false, true},
		{"-j CT --zone 0", Zone{}, true, true},
		{"-s 10.9.9.9/32 -j CT --zone 5", Zone{}, true, true},
		{"-i lo -j CT --zone 5", Zone{}, true, true},
	} {
		tables, err := Parse(service.IPv4, "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING "+tt.rule+"\nCOMMIT\n", nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		p := NewPacket(service.TCP, netip.MustParseAddrPort("10.1.0.2:40001"), netip.MustParseAddrPort("10.96.0.10:80"), "client")
		first := tables.Walk(p, Prerouting, Whole).Outcomes[0].Packet.Zone
		if first != tt.zone || (Zone{}).Finds(first, true) != tt.answer || (Zone{}).Finds(first, false) != tt.later || !first.Finds(first, true) || !first.Finds(first, false) {
			t.Errorf("%s: zone %+v, want %+v; found by an answer %v, by a later packet %v", tt.rule, first, tt.zone, (Zone{}).Finds(first, true), (Zone{}).Finds(first, false))
		}
	}
}

// TestStages: conntrack is between the stages of a hook, of a part of one too.
func TestStages(t *testing.T) {
	for _, tt := range []struct {
		hook Hook
		span Span
		want [3]Span
	}{
		{Prerouting, Whole, [3]Span{{Whole.From, -200}, {-200, -100}, {-100, Whole.Before}}},
		{Output, OutputAfterBalancing, [3]Span{{-98, -98}, {-98, -98}, {-98, Whole.Before}}},
		{Output, OutputBeforeBalancing, [3]Span{{Whole.From, -200}, {-200, -100}, {-100, -98}}},
		{Input, Whole, [3]Span{{Whole.From, Whole.From}, {Whole.From, 100}, {100, Whole.Before}}},
		{Forward, Whole, [3]Span{{Whole.From, Whole.From}, Whole, {Whole.Before, Whole.Before}}},
	} {
		if got := tt.span.Stages(tt.hook); got != tt.want {
			t.Errorf("%s %v: %v, want %v", tt.hook, tt.span, got, tt.want)
		}
	}
}
