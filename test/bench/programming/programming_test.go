package main

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/test/bench/result"
)

func TestAddressesAreDistinct(t *testing.T) {
	for _, w := range []world{{10, 10}, {1000, 10}, {100, 1}, {50, 2000}} {
		seen := map[string]bool{}
		total := 0
		for i := range w.services {
			for side := range sides {
				for _, e := range w.slice(i, side).Endpoints {
					a := netip.MustParseAddr(e.Addresses[0])
					if !endpointNetworks[side].Contains(a) {
						t.Fatalf("%+v: endpoint %s of service %d isn't in side %d's network", w, a, i, side)
					}
					seen[a.String()] = true
					total++
				}
			}
			ip := w.service(i).Spec.ClusterIP
			if !netip.MustParsePrefix("10.96.0.0/12").Contains(netip.MustParseAddr(ip)) {
				t.Fatalf("%+v: service %d has %s, which is outside of the API server's network", w, i, ip)
			}
			seen[ip] = true
		}
		if want := total + w.services; len(seen) != want {
			t.Errorf("%+v: %d distinct addresses, want %d", w, len(seen), want)
		}
		if total != sides*w.endpointCount() {
			t.Errorf("%+v: %d endpoints at both sides, endpointCount says %d at each", w, total, w.endpointCount())
		}
	}
}

func TestMovablesAreSpread(t *testing.T) {
	for _, n := range []int{10, 19, 100, 10_000} {
		w := world{n, 10}
		seen := map[int]bool{}
		for k := range movables {
			seen[w.movable(k)] = true
		}
		count := 0
		for i := range n {
			if w.isMovable(i) {
				count++
				if !seen[i] {
					t.Errorf("%d services: %d is movable and no movable(k)", n, i)
				}
			}
		}
		if count != movables || len(seen) != movables {
			t.Errorf("%d services: %d are movable, %d distinct; want %d", n, count, len(seen), movables)
		}
	}
}

func TestLogWatch(t *testing.T) {
	w, err := newLogWatch("complete", t.TempDir(), "x")
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for _, text := range []string{
		"nothing\nSync com", "plete", " now\n", `complete ipFamily="IPv6"` + "\n", "the rest is not a line: complete",
	} {
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := w.after(began); !ok || len(w.marks) != 1 {
		t.Errorf("marks %v, want one after %s", w.marks, began)
	}
	if _, ok := w.after(time.Now()); ok {
		t.Error("there is a mark in the future")
	}
}

func TestEndpointPattern(t *testing.T) {
	for _, text := range []string{
		`-A KPROXY-SVC-X -p tcp -m tcp -j DNAT --to-destination 10.128.1.50:9100`,
		`-A KUBE-SEP-X -p tcp -m tcp -j DNAT --to-destination 10.128.1.50:9100`,
		`ip saddr 10.128.1.50 jump mark-for-masquerade meta l4proto tcp dnat to 10.128.1.50:9100`,
		`dnat ip to numgen random mod 2 map { 0 : 10.128.1.50 . 9100, }`,
	} {
		m := endpointPattern.FindAllStringSubmatch(text, -1)
		if len(m) != 1 || m[0][1] != "10.128.1.50" {
			t.Errorf("%s: found %v", text, m)
		}
	}
	if m := endpointPattern.FindString("-s 10.128.1.50/32 -j KUBE-MARK-MASQ"); m != "" {
		t.Errorf("found %s, which is no destination", m)
	}
}

func TestOptions(t *testing.T) {
	for _, tt := range []struct {
		args string
		want []string // parts of the error
	}{
		{"-services 0,100", []string{"0 services are not between"}},
		{"-services x", []string{`services "x"`}},
		{"-subjects a,kproxy-nft -cases b", []string{`subject "a"`, `case "b"`}},
		{"-source c", []string{`source "c"`}},
		{"-rounds 0", []string{"must be positive"}},
		{"-endpoints 1000", []string{"× 1000 endpoints"}},
		{"x", []string{`unexpected argument "x"`}},
	} {
		_, err := parseOptions(strings.Fields(tt.args))
		if err == nil {
			t.Errorf("%s: no error", tt.args)
			continue
		}
		for _, want := range tt.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %q doesn't say %q", tt.args, err, want)
			}
		}
	}
}

func TestManifestsAreWhole(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	w := world{250, 2}
	s, err := newManifestSource(dir, w)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.move(t.Context(), w.movable(3), 1); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(b)
	}
	got := map[string]int{
		"files": len(files), "services": strings.Count(text.String(), `"kind":"Service"`), "slices": strings.Count(text.String(), `"kind":"EndpointSlice"`),
		"moved": strings.Count(text.String(), `"10.160.`),
	}
	if diff := cmp.Diff(map[string]int{"files": 3 + movables, "services": 250, "slices": 250, "moved": 1}, got); diff != "" {
		t.Errorf("what was written (-want +got):\n%s", diff)
	}
}

func TestEveryFigureIsDescribed(t *testing.T) {
	names := map[string]bool{}
	for _, c := range described(world{10_000, 10}) {
		if names[c.Name] || c.Unit == "" || c.Work == "" || c.Figure == "" {
			t.Errorf("%+v is there twice or incomplete", c)
		}
		names[c.Name] = true
		for _, target := range c.Targets {
			for _, name := range append(target.Against, target.Subject) {
				if _, ok := subjectOf(name); !ok {
					t.Errorf("%s has a target about %q, which is no subject", c.Name, name)
				}
			}
		}
	}
	if got, want := figChange.caseName(10_000), "programming-change-10000/write"; got != want {
		t.Errorf("name %s, want %s", got, want)
	}
}

// A value bears the round that it is of, and the failures of the case that it comes from.
func TestFindingsKnowRoundsAndFailures(t *testing.T) {
	var f findings
	s, _ := subjectOf("kproxy-nft")
	for f.round = range 3 {
		if f.round == 1 {
			f.fail(s, caseChange, errors.New("it met the other side"))
			continue
		}
		f.add(s, figChange, float64(f.round))
		f.add(s, figChangeCPU, 5)
	}
	f.add(s, figRSSLater, 1)
	f.add(s, figRSSLater, 2)
	if twice, _ := f.subject(figRSSLater, s.name); len(twice.Values) != 1 || twice.Failures != 1 {
		t.Errorf("of two values of one round there are %v, and %d failures", twice.Values, twice.Failures)
	}
	got, _ := f.subject(figChange, s.name)
	want := result.NewSubject(s.name, []float64{0, 2})
	want.Rounds, want.Failures, want.Error = []int{0, 2}, 1, "it met the other side"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after a failure (-want +got):\n%s", diff)
	}
	if cpu, ok := f.subject(figChangeCPU, s.name); !ok || cpu.Failures != 0 {
		t.Errorf("a figure of another case has %d failures", cpu.Failures)
	}
	if _, ok := f.subject(figRSS, s.name); ok {
		t.Error("there is a figure that wasn't measured")
	}
}

// Every figure comes from a case, and with fewer services than targets are about it is held to
// what holds for any number.
func TestFiguresAndTheirTargets(t *testing.T) {
	for _, c := range described(world{services: 2000, endpoints: 10}) {
		if of := figure(c.Name); !slices.Contains(allCases, of.from()) {
			t.Errorf("figure %s comes from %q, which is no case", of, of.from())
		}
		for _, target := range c.Targets {
			if figure(c.Name) != figChangeTold && !slices.Equal(target.Against, []string{"kube-proxy-iptables-nft"}) {
				t.Errorf("with 2,000 services %s has a target of its own: %+v", c.Name, target)
			}
		}
	}
}
