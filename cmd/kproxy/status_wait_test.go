package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

func TestStatusWaits(t *testing.T) {
	denied := errors.New("permission denied")
	starting := plan.Status{NotReady: "the kernel's rules aren't written yet"}
	type answer struct {
		st  plan.Status
		err error
	}
	tests := []struct {
		name    string
		answers []answer // the last one again and again
		want    string   // in the error; empty for none
	}{
		{"ready at once", []answer{{st: plan.Status{Ready: true}}}, ""},
		{"not started, starting, ready", []answer{{err: fmt.Errorf("%w: no socket", web.ErrNotRunning)}, {st: starting}, {st: plan.Status{Ready: true}}}, ""},
		{"never ready", []answer{{st: starting}}, "isn't ready after 1m0s: the kernel's rules aren't written yet"},
		{"never started", []answer{{err: web.ErrNotRunning}}, "isn't ready after 1m0s: kproxy isn't running here"},
		{"may not be asked", []answer{{err: denied}}, "permission denied"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				asked := 0
				err := waitUntilReady(t.Context(), time.Minute, func(context.Context) (plan.Status, error) {
					a := tt.answers[min(asked, len(tt.answers)-1)]
					asked++
					return a.st, a.err
				})
				switch {
				case tt.want == "" && err != nil:
					t.Errorf("got %v, want no error", err)
				case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
					t.Errorf("got %v, want an error with %q", err, tt.want)
				}
			})
		})
	}
}

// TestStatusIsInterrupted: what is said is how long it waited.
func TestStatusIsInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		err := waitUntilReady(ctx, time.Minute, func(context.Context) (plan.Status, error) { return plan.Status{NotReady: "so"}, nil })
		if err == nil || !strings.Contains(err.Error(), "isn't ready after 3s: so") {
			t.Errorf("got %v", err)
		}
	})
}
