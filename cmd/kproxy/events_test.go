package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

func eventAt(second int, kind, service, message string) plan.Event {
	return plan.Event{Time: time.Date(2026, 1, 2, 3, 4, second, 0, time.FixedZone("there", 3600)), Kind: kind, Service: service, Message: message}
}

// eventful is dns, where something has happened.
func eventful() *fakeProxy {
	f := dns()
	f.past = []plan.Event{
		eventAt(1, "dataplane", "default/web", "added, userspace: new"),
		eventAt(1, "dataplane", "kube-system/dns:dns", "added, userspace: new"),
		eventAt(1, "dataplane", "default/gone", "added, userspace: new"),
		eventAt(2, "health", "kube-system/dns:dns", "10.2.0.3:53 is down: timeout"),
		eventAt(3, "sync", "", "sync failed: busy"),
		eventAt(4, "dataplane", "default/gone", "removed"),
	}
	return f
}

func TestEvents(t *testing.T) {
	socket := eventful().serve(t)
	for line, want := range map[string]string{
		"":                             "0 1 2 3 4 5",
		"--limit 2":                    "4 5",
		"default/web":                  "0",
		"default/web:80":               "0",
		"10.96.0.10:53/udp":            "1 3",
		"kube-system/dns":              "1 3",
		"kube-system/dns:dns-tcp":      "",
		"kube-system/dns:53":           "1 3",
		"kube-system/dns:53 --limit=1": "3",
		"default/gone":                 "2 5", // it isn't in the status any more
	} {
		got := runLine(t, append(strings.Fields("events -o json --socket "+socket), strings.Fields(line)...)...)
		var events []plan.Event
		if err := json.Unmarshal([]byte(got.stdout), &events); err != nil || events == nil || got.err != "" {
			t.Fatalf("events %s: %v: %+v", line, err, got)
		}
		var which []string
		for _, e := range events {
			for i, p := range eventful().past {
				if inUTC(e) == inUTC(p) {
					which = append(which, fmt.Sprint(i))
				}
			}
		}
		if got := strings.Join(which, " "); got != want || len(which) != len(events) {
			t.Errorf("events %s: %s, want %s", line, got, want)
		}
	}
	for line, want := range map[string]string{
		"default/wbe": "there is no service default/wbe, did you mean default/web?", "--limit 0": "--limit: 0 is not from 1 to 2000", "--limit 2001": "--limit: 2001 is not",
	} {
		if got := runLine(t, append(strings.Fields("events --socket "+socket), strings.Fields(line)...)...); !strings.HasPrefix(got.err, want) {
			t.Errorf("events %s: %q, want %q", line, got.err, want)
		}
	}
}

func TestEventTable(t *testing.T) {
	at := func(second int) string { return eventAt(second, "", "", "").Time.Local().Format(time.DateTime) }
	got := runLine(t, "events", "--limit", "3", "--socket", eventful().serve(t))
	want := "TIME                 KIND       SERVICE              MESSAGE\n" +
		at(2) + "  health     kube-system/dns:dns  10.2.0.3:53 is down: timeout\n" +
		at(3) + "  sync       -                    sync failed: busy\n" +
		at(4) + "  dataplane  default/gone         removed\n"
	if d := cmp.Diff(want, got.stdout); d != "" || got.status != 0 {
		t.Errorf("(-want +got):\n%s%s", d, got.err)
	}
}

// Following begins with the past, tells nothing twice, and goes on after a
// restart of kproxy.
func TestEventsAreFollowed(t *testing.T) {
	for _, format := range []string{"table", "json"} {
		t.Run(format, func(t *testing.T) {
			f := eventful()
			f.streams = [][]plan.Event{
				{f.past[1], f.past[3], eventAt(5, "health", "kube-system/dns:dns", "it is up"), eventAt(5, "health", "kube-system/dnsmasq", "of another")},
				{eventAt(6, "dataplane", "kube-system/dns:dns-tcp", "the last")},
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out := &stopAt{text: "the last", stop: cancel}
			app := newApp()
			app.Writer = out
			if err := run(ctx, app, strings.Fields("kproxy events kube-system/dns -w -o "+format+" --socket "+f.serve(t))); err != nil {
				t.Fatal(err)
			}
			var got []string
			for dec := json.NewDecoder(&out.Buffer); format == "json" && dec.More(); {
				var e plan.Event
				if err := dec.Decode(&e); err != nil {
					t.Fatal(err)
				}
				got = append(got, e.Message)
			}
			if format == "table" {
				for _, line := range strings.Split(strings.TrimSpace(out.String()), "\n")[1:] {
					got = append(got, line[strings.LastIndex(line, "  ")+2:])
				}
			}
			if d := cmp.Diff([]string{f.past[1].Message, f.past[3].Message, "it is up", "the last"}, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// stopAt keeps what is written, and stops at a text.
type stopAt struct {
	bytes.Buffer
	text string
	stop func()
}

func (s *stopAt) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(s.text)) {
		s.stop()
	}
	return s.Buffer.Write(b)
}
