package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/cmd/kproxy/screen/terminal"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
	"kproxy.dev/kproxy/web"
)

// watchEvery is how often a watched kproxy is asked.
const watchEvery = time.Second

// canDraw reports whether out is this process's terminal, and one to draw on.
func canDraw(out io.Writer) bool {
	f := fileOf(out)
	return f != nil && terminal.Usable(os.Stdin, f, os.Getenv("TERM"))
}

// model is a screen's content.
type model[T any] interface {
	terminal.Model
	Update(T, time.Time)
	Fail(error, time.Time)
}

// watchOnScreen draws m on the terminal until the user leaves, and asks for what it shows
// every second, whether or not kproxy is there. Beside, it has the others change m.
func watchOnScreen[T any](ctx context.Context, m model[T], ask func(context.Context) (T, error), others ...func(context.Context, *terminal.Screen)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := terminal.New(os.Stdin, os.Stdout, m)
	var feeds sync.WaitGroup
	feeds.Go(func() {
		for again := true; again; again = sleep(ctx, watchEvery) {
			answer, err := ask(ctx)
			s.Do(func() {
				if err != nil {
					m.Fail(err, time.Now())
				} else {
					m.Update(answer, time.Now())
				}
			})
		}
	})
	for _, feed := range others {
		feeds.Go(func() { feed(ctx, s) })
	}
	err := s.Run(ctx)
	cancel()
	feeds.Wait()
	return err
}

// watchStatus watches a kproxy on the terminal: its status, the page of a service, and its events,
// also after a restart. first is the first status; zero where none is known yet.
func watchStatus(ctx context.Context, client *web.Client, c screen.Config, first plan.Status, status func(context.Context) (plan.Status, error), g *guide) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pins := make(chan web.PinRequest, 1)
	c.Pin = func(s plan.ServiceStatus, where string) {
		select {
		case pins <- pinRequest(&s, service.Preference(where)):
		default: // the one before isn't answered yet
		}
	}
	if g != nil {
		c.Guide, c.Answer = g.views(), g.answer
	}
	m := screen.New(c)
	if first.Version != "" {
		m.Update(first, time.Now())
	}
	events := func(ctx context.Context, s *terminal.Screen) {
		for again := true; again; again = sleep(ctx, watchEvery) {
			// The status shows why the events ended.
			_ = client.Events(ctx, func() error { return nil }, func(e plan.Event) { s.Do(func() { m.Event(e) }) })
		}
	}
	others := []func(context.Context, *terminal.Screen){events, func(ctx context.Context, s *terminal.Screen) { fillPages(ctx, client, m, s) }, func(ctx context.Context, s *terminal.Screen) {
		for {
			select {
			case <-ctx.Done():
				return
			case req := <-pins:
				said := "pinned to " + string(req.Preference)
				if res, err := client.Pin(ctx, req); err != nil {
					said = "it isn't pinned: " + err.Error()
				} else if len(res.Pinned) > 0 {
					said = fmt.Sprintf("%s: %s", strings.Join(res.Pinned, ", "), req.Preference)
				}
				s.Do(func() { m.Say(said) })
			}
		}
	}}
	if g != nil {
		others = append(others, func(ctx context.Context, s *terminal.Screen) { g.run(ctx, m, s) })
	}
	return watchOnScreen(ctx, m, status, others...)
}

// fillPages looks up what the page that is open has besides its status.
func fillPages(ctx context.Context, client *web.Client, m *screen.Model, live *terminal.Screen) {
	var asked time.Time
	was := ""
	for ; ; sleep(ctx, watchEvery/5) {
		var s plan.ServiceStatus
		var wantTrace, open bool
		if !live.Do(func() { s, wantTrace, open = m.Open() }) {
			return
		}
		if title := s.Title(); title != was {
			was, asked = title, time.Time{}
		}
		if !open || !wantTrace && time.Since(asked) < watchEvery {
			continue
		}
		asked = time.Now()
		rows, err := client.Connections(ctx, s.Title())
		if err != nil {
			continue // the status says why
		}
		p := screen.Page{Connections: slices.DeleteFunc(rows, func(r plan.ConnectionStatus) bool { return !strings.EqualFold(r.Protocol, s.Protocol) })}
		if wantTrace {
			p.Trace = traceLines(ctx, client, &s, p.TraceFrom())
		}
		live.Do(func() { m.Fill(&s, p) })
	}
}

// traceLines returns what `kproxy trace` says of a service's first address, or why there is no trace.
func traceLines(ctx context.Context, client *web.Client, s *plan.ServiceStatus, from netip.Addr) []string {
	if len(s.Addresses) == 0 {
		return []string{"it has no address of its own; kproxy trace follows packets to a node port"}
	}
	req := trace.Request{Address: s.Addresses[0], From: from}
	if from.IsValid() && from.Is4() != req.Address.Addr().Is4() {
		req.From = netip.Addr{}
	}
	err := req.Protocol.UnmarshalText([]byte(s.Protocol))
	if err == nil {
		var res trace.Result
		if res, err = client.Trace(ctx, req); err == nil {
			return strings.Split(strings.TrimSpace(res.Text(trace.Look{})), "\n")
		}
	}
	return []string{"no trace: " + err.Error(), "r tries again"}
}

// watchPlainly prints a snapshot every second, for pipes and files. A kproxy
// that doesn't answer any more is a line, as it may come back; one that never
// did is an error.
func watchPlainly[T any](ctx context.Context, out io.Writer, ask func(context.Context) (T, error), show func(io.Writer, T) error) error {
	for first := true; ; first = false {
		answer, err := ask(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && first:
			return err
		case err != nil:
			_, err = fmt.Fprintln(out, "kproxy doesn't answer:", err)
		default:
			err = show(out, answer)
		}
		if err != nil {
			return err
		}
		if !sleep(ctx, watchEvery) {
			return nil
		}
	}
}

// waitEvery is how often a kproxy that isn't ready is asked again.
const waitEvery = 100 * time.Millisecond

// waitUntilReady asks until kproxy is ready. One that isn't there yet, or doesn't
// answer, is waited for; one that may not be asked isn't.
func waitUntilReady(ctx context.Context, timeout time.Duration, status func(context.Context) (plan.Status, error)) error {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	why := "it didn't answer in time"
	for {
		st, err := status(ctx)
		switch {
		case err == nil && st.Ready:
			return nil
		case err == nil:
			why = st.NotReady
		case ctx.Err() != nil: // the last answer says more
		case errors.Is(err, web.ErrNotRunning), errors.Is(err, web.ErrNoAnswer):
			why = err.Error()
		default:
			return err
		}
		if !sleep(ctx, waitEvery) {
			return fmt.Errorf("kproxy isn't ready after %v: %s", min(timeout, time.Since(began).Round(waitEvery)), why) // it may be interrupted
		}
	}
}
