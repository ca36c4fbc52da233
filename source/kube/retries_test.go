package kube

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestRetriesPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r retries
		took := func(during func(done chan struct{})) time.Duration {
			start, done := time.Now(), make(chan struct{})
			first, second := r.pause(time.Minute, done), r.pause(time.Hour, done)
			during(done)
			<-first
			d := time.Since(start)
			r.hurry()
			<-second
			return d
		}
		if d := took(func(chan struct{}) {}); d != time.Minute {
			t.Errorf("a pause of a minute took %s", d)
		}
		if d := took(func(chan struct{}) { time.Sleep(time.Second); r.hurry() }); d != time.Second {
			t.Errorf("told to hurry after a second, a pause took %s", d)
		}
		if d := took(func(done chan struct{}) { time.Sleep(2 * time.Second); close(done) }); d != 2*time.Second {
			t.Errorf("told to stop after two seconds, a pause took %s", d)
		}
		r.hurry() // nobody waits
		if d := took(func(chan struct{}) {}); d != time.Minute {
			t.Errorf("told to hurry before it began, a pause of a minute took %s", d)
		}
	})
}

func TestBackoffIsBounded(t *testing.T) {
	b := backoff()
	var last time.Duration
	for range 100 {
		if last = b.Step(); last < retryFirst || last > 2*retryMax {
			t.Errorf("a pause of %s", last)
		}
	}
	if last < retryMax {
		t.Errorf("after 100 failures, a pause of %s", last)
	}
}
