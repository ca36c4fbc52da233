package ipvs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
)

// Cleanup removes everything of IPVS that is kproxy's, without waiting for
// connections, and nothing else; then, by rules, everything else that kproxy made,
// which destroys the record. As long as virtual servers couldn't be removed,
// the record stays, and so do the rules. Where the kernel has no IPVS, there is
// only the link to remove.
func Cleanup(ctx context.Context, sets kernel.SetStore, rules func(context.Context) error) error {
	link, err := OpenLink()
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	defer link.Close()
	if err := cleanTable(link, sets); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	var errs []error
	for _, name := range []string{kernel.DummyLink, probeName} {
		if err := link.remove(name); err != nil && !errors.Is(err, ErrForeignLink) {
			errs = append(errs, fmt.Errorf("clean up: %w", err))
		}
	}
	return errors.Join(append(errs, rules(ctx))...)
}

// cleanTable removes kproxy's virtual servers.
func cleanTable(link Link, sets kernel.SetStore) error {
	if !Loaded() {
		return nil
	}
	table, err := OpenTable()
	if err != nil {
		return err
	}
	defer table.Close()
	requests, err := removals(table, link, sets)
	if err != nil {
		return err
	}
	var errs *multierror.Error
	for _, err := range table.Change(requests...) {
		if !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, err)
		}
	}
	return errs.ErrorOrNil()
}

// removals remove every virtual server that kproxy made, or its own real servers where
// it has others' as well.
func removals(t Table, link Link, sets kernel.SetStore) ([]Request, error) {
	b := &Backend{config: Config{Table: t, Link: link, Sets: sets, Now: time.Now}}
	if _, err := link.State(); errors.Is(err, ErrForeignLink) {
		b.config.Link = noLink{}
	}
	if _, _, err := b.read(nil); err != nil {
		return nil, err
	}
	all, err := t.List()
	if err != nil {
		return nil, err
	}
	var requests []Request
	for _, found := range all {
		s := b.servers[keyOf(found.Virtual)]
		switch {
		case s != nil:
			requests = append(requests, s.removal(found)...)
		case isScratch(found):
			requests = append(requests, Request{Do: Delete, Virtual: found.Virtual})
		}
	}
	return requests, nil
}

func (s *server) removal(found Server) []Request {
	var own []Request
	for _, r := range found.Reals {
		if _, draining := s.draining[r.Address]; draining || s.reals[r.Address] {
			own = append(own, Request{Do: Delete, Virtual: s.Virtual, Real: r})
		}
	}
	if len(own) == len(found.Reals) {
		return []Request{{Do: Delete, Virtual: s.Virtual}}
	}
	return own
}

// noLink is the link of a host where another one has its name.
type noLink struct{ Link }

func (noLink) State() (LinkState, error) { return LinkState{}, nil }

// Preview says what [Cleanup] would remove of IPVS, a line each, and changes nothing.
func Preview(sets kernel.SetStore) (out []string, err error) {
	link, err := OpenLink()
	if err != nil {
		return nil, err
	}
	defer link.Close()
	if Loaded() {
		if out, err = previewTable(link, sets); err != nil {
			return nil, err
		}
	}
	if s, err := link.State(); err == nil && s.Exists {
		out = append(out, fmt.Sprintf("link %s, %d addresses", kernel.DummyLink, len(s.Addresses)))
	} else if err != nil && !errors.Is(err, ErrForeignLink) {
		return nil, err
	}
	if l, err := link.find(probeName); err == nil && l != nil {
		out = append(out, "link "+probeName)
	}
	return out, nil
}

func previewTable(link Link, sets kernel.SetStore) (out []string, err error) {
	table, err := OpenTable()
	if err != nil {
		return nil, err
	}
	defer table.Close()
	requests, err := removals(table, link, kernel.Unchanged{SetStore: sets})
	if err != nil {
		return nil, err
	}
	for _, r := range requests {
		line := fmt.Sprintf("virtual server %s %s", r.Virtual.Protocol, r.Virtual.Address)
		if r.ofReal() {
			line += fmt.Sprintf(", its real server %s", r.Real.Address)
		}
		out = append(out, line)
	}
	return out, nil
}
