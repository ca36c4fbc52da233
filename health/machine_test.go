package health

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

var (
	epoch      = time.Unix(1_700_000_000, 0).UTC()
	errRefused = errors.New("connection refused")
)

// observe feeds results ('+', '-', or '.' for silence), one a second, and returns the status
// after each: 'u' unknown, 'U' up, 'D' down.
func observe(m *Machine, results string) string {
	out := make([]byte, 0, len(results))
	for i, r := range results {
		var err error
		switch r {
		case '-':
			err = errRefused
		case '.':
			err = fmt.Errorf("udp: %w", ErrSilent)
		}
		s := m.Observe(err, epoch.Add(time.Duration(i)*time.Second))
		out = append(out, "uUD"[s.Status])
	}
	return string(out)
}

func TestMachineStatus(t *testing.T) {
	tests := map[string]struct {
		rise, fall int
		results    string
		want       string
	}{
		"rises":                       {2, 3, "+++", "uUU"},
		"falls":                       {2, 3, "----", "uuDD"},
		"unknown needs a row":         {2, 3, "+-+--+-++", "uuuuuuuuU"},
		"one lost probe changes none": {2, 3, "++-+-+--+", "uUUUUUUUU"},
		"down after fall in a row":    {2, 3, "++--+---", "uUUUUUUD"},
		"up after rise in a row":      {2, 3, "---+-+-++", "uuDDDDDDU"},
		"at once":                     {1, 1, "+-+-", "UDUD"},
		"zero is one":                 {0, 0, "-+", "DU"},

		"silence makes unknown up":           {2, 3, "..", "uU"},
		"silence keeps up":                   {2, 3, "++....-.-.-", "uUUUUUUUUUU"},
		"silence between failures":           {2, 3, "---..-..-....-", "uuDDDDDDDDDDDD"},
		"five silences bring back":           {2, 3, "---.....", "uuDDDDDU"},
		"as many as twice rise":              {4, 1, "-........", "DDDDDDDDU"},
		"an answer brings back":              {2, 3, "---++", "uuDDU"},
		"silence, then an answer":            {2, 3, "---.+", "uuDDU"},
		"an answer, then silence":            {2, 3, "---+.", "uuDDU"},
		"an answer before the last failure":  {2, 3, "---+-..", "uuDDDDD"},
		"a failure starts silence over":      {2, 3, "---....-....", "uuDDDDDDDDDD"},
		"rise one, silence doesn't bring up": {1, 1, "-....+", "DDDDDU"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m := NewMachine(service.HealthCheck{Rise: tt.rise, Fall: tt.fall})
			if diff := cmp.Diff(tt.want, observe(&m, tt.results)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.results, diff)
			}
		})
	}
}

func TestMachineState(t *testing.T) {
	at := func(s int) time.Time { return epoch.Add(time.Duration(s) * time.Second) }
	m := NewMachine(service.HealthCheck{Rise: 2, Fall: 3})
	observe(&m, "++-")
	if diff := cmp.Diff(State{Status: Up, Since: at(1), LastError: "connection refused"}, m.State()); diff != "" {
		t.Errorf("up, last probe failed (-want +got):\n%s", diff)
	}
	observe(&m, "--")
	down := m.State()
	if diff := cmp.Diff(State{Status: Down, Since: at(1), LastError: "connection refused", Flaps: []time.Time{at(1)}}, down); diff != "" {
		t.Errorf("down (-want +got):\n%s", diff)
	}
	observe(&m, "+++")
	if diff := cmp.Diff(State{Status: Up, Since: at(1), Flaps: []time.Time{at(1), at(1)}}, m.State()); diff != "" {
		t.Errorf("up again (-want +got):\n%s", diff)
	}
	if len(down.Flaps) != 1 {
		t.Errorf("a State that was returned before has changed: %v", down.Flaps)
	}
}

// While silence hasn't brought it back, the state says what was wrong.
func TestSilenceKeepsTheError(t *testing.T) {
	m := NewMachine(service.HealthCheck{Rise: 2, Fall: 1})
	observe(&m, "-....")
	if got := m.State().LastError; got != "connection refused" {
		t.Errorf("down and silent: last error %q", got)
	}
	observe(&m, ".")
	if s := m.State(); s.Status != Up || s.LastError != "" {
		t.Errorf("up after silence: %+v", s)
	}
}

func TestFlapsAreBounded(t *testing.T) {
	m := NewMachine(service.HealthCheck{Rise: 1, Fall: 1})
	var results string
	for range 50 {
		results += "+-"
	}
	observe(&m, results)
	s := m.State()
	if len(s.Flaps) != maxFlaps {
		t.Fatalf("%d flaps kept, want %d", len(s.Flaps), maxFlaps)
	}
	if want := epoch.Add(99 * time.Second); !s.Flaps[maxFlaps-1].Equal(want) {
		t.Errorf("last flap at %s, want %s", s.Flaps[maxFlaps-1], want)
	}
}

func TestResumeKeepsTheState(t *testing.T) {
	m := NewMachine(service.HealthCheck{Rise: 1, Fall: 1})
	observe(&m, "+-")
	next := NewMachine(service.HealthCheck{Rise: 2, Fall: 2}).Resume(m.State())
	if diff := cmp.Diff(m.State(), next.State()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff("DU", observe(&next, "++")); diff != "" {
		t.Errorf("status after two successes (-want +got):\n%s", diff)
	}
}
