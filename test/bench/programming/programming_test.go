package programming

import (
	"cmp"
	"errors"
	"flag"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/lab/report"
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
	w := logWatch{mark: []byte("complete")}
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
		want string // a part of the error
	}{
		{"-services 0,100", "0 services"}, {"-services x", `"x"`}, {"-changes 0", "must be positive"}, {"-services 100000", "100000 services"},
		{"-services 10,20 -changes 3 -slow", ""},
	} {
		o := Default()
		set := flag.NewFlagSet("", flag.ContinueOnError)
		set.SetOutput(io.Discard)
		o.Flags(set)
		err := cmp.Or(set.Parse(strings.Fields(tt.args)), o.Validate())
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v doesn't say %q", tt.args, err, tt.want)
		}
	}
}

func TestFiguresAreComplete(t *testing.T) {
	names := map[string]bool{}
	for _, f := range figures {
		if names[f.name] || f.unit == "" || f.work == "" || f.text == "" || !slices.Contains(Cases, f.from) {
			t.Errorf("%+v is there twice or incomplete", f)
		}
		names[f.name] = true
	}
}

// A value has the round that it is of, and the failures of the case that it comes from.
func TestReportHasRoundsAndFailures(t *testing.T) {
	r := rig{Options: Default(), world: world{10_000, 10}}
	r.Subjects = []string{"kproxy-nft", "kube-proxy-iptables-nft"}
	r.describe()
	s := subjectOf("kproxy-nft")
	for r.round = range 3 {
		if r.round == 1 {
			r.fail(s, caseChange, errors.New("it met the other side"))
			continue
		}
		r.add(s, figChange, float64(r.round))
		r.add(s, figChangeCPU, 5)
	}
	var out report.Report
	if errs := r.report(&out); len(errs) != 1 || len(out.Absent) != 1 || len(out.Warnings) != 1 {
		t.Errorf("errors %v, absent %v, warnings %v; want one each", errs, out.Absent, out.Warnings)
	}
	if len(out.Cases) != 2 {
		t.Fatalf("%d cases, want those with values", len(out.Cases))
	}
	want := report.Subject{Name: s.Name, Class: report.KProxy, Values: []float64{0, 2}, Rounds: []int{0, 2}, Spread: report.Spread{Median: 1, Max: 2}, Failures: 1, Error: "it met the other side"}
	if diff := gocmp.Diff(&want, out.Case("programming-10000/change/write").Subject(s.Name)); diff != "" {
		t.Errorf("after a failure (-want +got):\n%s", diff)
	}
	if other := out.Case("programming-10000/change/cpu").Subject(s.Name); other.Failures != 0 {
		t.Errorf("a figure of another case has %d failures", other.Failures)
	}
}
