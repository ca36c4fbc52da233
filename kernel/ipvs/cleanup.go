package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
)

// Cleanup removes everything of IPVS that is kproxy's, without waiting for
// connections, and nothing else; then everything else of kproxy's by rules,
// which destroys the record. As long as virtual servers couldn't be removed,
// the record stays, and so do the rules. Where the kernel has no IPVS, there is
// only the link to remove.
func Cleanup(ctx context.Context, sets kernel.SetStore, rules func(context.Context) error) error {
	link, err := OpenLink()
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	defer link.Close()
	if _, err := os.Stat(procPath); err != nil { // asking for the netlink family would load the module
		return errors.Join(removeOwn(link), rules(ctx))
	}
	table, err := OpenTable()
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	defer table.Close()
	if err := CleanTable(table, link, sets); err != nil {
		return err
	}
	if err := StopSync(); err != nil { // before the rules go that nobody else reaches it through
		return fmt.Errorf("clean up: %w", err)
	}
	return rules(ctx)
}

// removeOwn removes the link if it is kproxy's, and the one that a start which
// was killed may have left. Someone else's of the same name is no reason not to
// clean up.
func removeOwn(link Link) error {
	if err := link.Remove(); err != nil && !errors.Is(err, ErrForeignLink) {
		return fmt.Errorf("clean up: %w", err)
	}
	if err := removeProbe(); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return nil
}

// CleanTable removes kproxy's virtual servers and link, but not the record. A
// virtual server in which somebody else has a real server stays for that.
func CleanTable(t Table, link Link, sets kernel.SetStore) error {
	requests, err := removals(t, link, sets)
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	var errs *multierror.Error
	for _, err := range t.Change(requests...) {
		if !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, err)
		}
	}
	return multierror.Append(errs, removeScratch(t), removeOwn(link)).ErrorOrNil()
}

// removals remove every virtual server of kproxy's.
func removals(t Table, link Link, sets kernel.SetStore) ([]Request, error) {
	b := &Backend{config: Config{Table: t, Link: link, Sets: sets, Now: time.Now}}
	if _, err := link.State(); errors.Is(err, ErrForeignLink) {
		b.config.Link = noLink{}
	}
	if _, err := b.look(nil); err != nil {
		return nil, err
	}
	all, err := t.List()
	if err != nil {
		return nil, err
	}
	var requests []Request
	for _, found := range all {
		if s := b.servers[keyOf(found.Virtual)]; s != nil {
			requests = append(requests, s.removal(found)...)
		}
	}
	return requests, nil
}

// removal removes a virtual server of kproxy's, or its own real servers only.
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

// noLink is the link of a host where somebody else has one of its name.
type noLink struct{ Link }

func (noLink) State() (LinkState, error) { return LinkState{}, nil }
