package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

// eventsAtMost is how many events a running kproxy remembers.
const eventsAtMost = 2000

func eventsCommand() *cli.Command {
	return &cli.Command{
		Name:      "events",
		Usage:     "list what happened: services that came, went or moved between data planes, endpoints that went up or down, failed syncs",
		ArgsUsage: "[" + targetUsage + "]",
		Flags: []cli.Flag{
			socketFlag(), outputFlag("table", "json", "yaml"),
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "go on with what happens from now on, also after a restart of kproxy"},
			&cli.IntFlag{Name: "limit", Value: 100, Usage: fmt.Sprintf("begin with the last `N` events, at most %d", eventsAtMost)},
		},
		Action: showEvents,
	}
}

func showEvents(c *cli.Context) error {
	which, err := oneTarget(c)
	if err != nil {
		return err
	}
	limit := c.Int("limit")
	if limit < 1 || limit > eventsAtMost {
		return usageError("--limit: %d is not from 1 to %d", limit, eventsAtMost)
	}
	client := clientOf(c)
	of, err := which.eventsOf(c.Context, client)
	if err != nil {
		return err
	}
	p := &eventPrinter{w: c.App.Writer, format: c.String("output"), single: c.Bool("watch")}
	if !c.Bool("watch") {
		past, err := pastEvents(c.Context, client, of, limit)
		if err != nil {
			return err
		}
		if len(past) == 0 {
			if _, err := which.lookUp(c.Context, client); err != nil { // it may be misspelt
				return err
			}
		}
		return p.print(past)
	}
	return followEvents(c.Context, client, of, limit, p)
}

// followEvents prints events until ctx ends, also those of a kproxy that is restarted.
func followEvents(ctx context.Context, client *web.Client, of []string, limit int, p *eventPrinter) error {
	for first := true; ; first = false {
		err := watchEvents(ctx, client, of, limit, p)
		switch {
		case ctx.Err() != nil:
			return nil
		case p.err != nil:
			return p.err
		case err != nil && first:
			return err
		case !sleep(ctx, watchEvery):
			return nil
		}
	}
}

// eventsOf returns the names, as events have them, of what t names; one empty
// name, for everything, where t is nil. A service that has gone has events, too.
func (t *target) eventsOf(ctx context.Context, client *web.Client) ([]string, error) {
	if t == nil {
		return []string{""}, nil
	}
	if _, err := strconv.Atoi(t.port); t.name != "" && err != nil {
		return []string{t.text}, nil
	}
	services, err := t.lookUp(ctx, client)
	var names []string
	for i := range services {
		names = append(names, services[i].Title())
	}
	return names, err
}

// pastEvents returns up to limit events of those names, oldest first.
func pastEvents(ctx context.Context, client *web.Client, of []string, limit int) ([]plan.Event, error) {
	all := []plan.Event{} // which JSON has as a list, too
	for _, name := range of {
		events, err := client.Timeline(ctx, name, limit)
		if err != nil {
			return nil, err
		}
		all = append(all, events...)
	}
	slices.SortStableFunc(all, func(a, b plan.Event) int { return b.Time.Compare(a.Time) })
	all = all[:min(limit, len(all))]
	slices.Reverse(all)
	return all, nil
}

// watchEvents prints what p hasn't printed yet, then what happens, until kproxy
// ends. The stream comes first, so that nothing is lost between the two.
func watchEvents(ctx context.Context, client *web.Client, of []string, limit int, p *eventPrinter) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	printed := map[plan.Event]bool{}
	return client.Events(ctx, func() error {
		past, err := pastEvents(ctx, client, of, limit)
		for _, e := range past {
			printed[inUTC(e)] = true
		}
		p.print(slices.DeleteFunc(past, func(e plan.Event) bool { return !e.Time.After(p.last) }))
		return err
	}, func(e plan.Event) {
		if !printed[inUTC(e)] && slices.ContainsFunc(of, func(name string) bool {
			return name == "" || e.Service == name || strings.HasPrefix(e.Service, name+":")
		}) {
			p.print([]plan.Event{e})
		}
		if p.err != nil {
			cancel()
		}
	})
}

// inUTC returns e so that it compares with == : times read of JSON may name the
// same zone differently.
func inUTC(e plan.Event) plan.Event {
	e.Time = e.Time.UTC()
	return e
}

// eventPrinter prints events as they come.
type eventPrinter struct {
	w      io.Writer
	format string
	single bool      // a document each, not a list
	begun  bool      // the heading is there
	wide   int       // the column of services
	last   time.Time // of the last event
	err    error     // the first of the writer's
}

func (p *eventPrinter) print(events []plan.Event) error {
	switch {
	case p.err != nil:
	case !isForPrograms(p.format):
		p.table(events)
	case p.single:
		for _, e := range events {
			p.keep(printValue(p.w, p.format, e))
		}
	default:
		p.keep(printValue(p.w, p.format, events))
	}
	for _, e := range events {
		p.last = e.Time
	}
	return p.err
}

func (p *eventPrinter) table(events []plan.Event) {
	for _, e := range events {
		p.wide = max(p.wide, len(e.Service))
	}
	line := func(cells ...any) {
		_, err := fmt.Fprintf(p.w, "%-19s  %-9s  %-*s  %s\n", cells...)
		p.keep(err)
	}
	if !p.begun {
		p.begun, p.wide = true, max(p.wide, len("SERVICE"))
		line("TIME", "KIND", p.wide, "SERVICE", "MESSAGE")
	}
	for _, e := range events {
		line(e.Time.Local().Format(time.DateTime), e.Kind, p.wide, cmp.Or(e.Service, "-"), e.Message)
	}
}

func (p *eventPrinter) keep(err error) {
	if p.err == nil {
		p.err = err
	}
}
