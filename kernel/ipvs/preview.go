package ipvs

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"kproxy.dev/kproxy/kernel"
)

// Preview says what [Cleanup] would remove of IPVS, a line each, and changes nothing.
func Preview(sets kernel.SetStore) ([]string, error) {
	link, err := OpenLink()
	if err != nil {
		return nil, err
	}
	defer link.Close()
	var out []string
	if _, err := os.Stat(procPath); err == nil { // asking for the netlink family would load the module
		if out, err = previewTable(link, sets); err != nil {
			return nil, err
		}
	}
	if s, err := link.State(); err == nil && s.Exists {
		out = append(out, fmt.Sprintf("link %s, %d addresses", kernel.DummyLink, len(s.Addresses)))
	} else if err != nil && !errors.Is(err, ErrForeignLink) {
		return nil, err
	}
	if _, err := netlink.LinkByName(probeName); err == nil {
		out = append(out, "link "+probeName)
	}
	return out, nil
}

func previewTable(link Link, sets kernel.SetStore) ([]string, error) {
	table, err := OpenTable()
	if err != nil {
		return nil, err
	}
	defer table.Close()
	requests, err := removals(table, link, kernel.Unchanged{SetStore: sets})
	if err != nil {
		return nil, err
	}
	all, err := table.List()
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		if isScratch(s) {
			requests = append(requests, Request{Do: Delete, Virtual: s.Virtual})
		}
	}
	var out []string
	for _, r := range requests {
		line := fmt.Sprintf("virtual server %s %s", r.Virtual.Protocol, r.Virtual.Address)
		if r.ofReal() {
			line += fmt.Sprintf(", its real server %s", r.Real.Address)
		}
		out = append(out, line)
	}
	daemons, err := syncDaemons()
	if slices.ContainsFunc(daemons, func(d runningDaemon) bool { return d.own }) {
		out = append(out, "synchronisation daemon of IPVS")
	}
	return out, err
}
