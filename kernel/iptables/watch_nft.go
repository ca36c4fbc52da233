package iptables

import (
	"context"
	"errors"
	"hash/maphash"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// nftWatch watches the nft variant. The kernel counts commits to a network
// namespace's tables: while the count stays, nothing changed. When it moves,
// the rules in kproxy's chains are read raw, without iptables, and compared by
// their hashes. Where it moved by as much as kproxy itself committed, only the
// chains that kproxy wrote are read.
type nftWatch struct {
	families []service.Family
	socket   *nl.SocketHandle
	seed     maphash.Seed

	generation uint32
	prints     map[string]fingerprint // per chain; nil until known
	notBefore  time.Time              // when rules may be read again

	// What kproxy has changed since generation.
	touched map[chainID]bool
	commits int
	unsure  bool // it isn't known what came of it
}

// Reading all rules takes a tenth of a second where there are 10,000 services. Programs
// that change their own rules all the time don't make kproxy do so all the
// time: between two readings passes restFactor times what one takes, but not
// so much that damage is found later than 5 s after it was done.
const (
	restFactor = 4
	restMax    = 2 * time.Second
)

func newNFTWatch(families []service.Family) (*nftWatch, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	return &nftWatch{families: families, socket: &nl.SocketHandle{Socket: s}, seed: maphash.MakeSeed()}, nil
}

func (w *nftWatch) close() { w.socket.Socket.Close() }

// changing remembers whose rules will be others. Jumps are in foreign chains, and
// iptables creates these where they don't exist yet: then everything is read.
func (w *nftWatch) changing(ops kernel.Ops) {
	if w.touched == nil {
		w.touched = map[chainID]bool{}
	}
	for _, f := range w.families {
		for _, chains := range [][]kernel.Chain{ops.Chains[f], ops.DelChains[f]} {
			for i := range chains {
				w.touched[chainID{f, chains[i].Table, chains[i].Name}] = true
			}
		}
		w.unsure = w.unsure || len(ops.AddJumps[f])+len(ops.DelJumps[f]) > 0
	}
}

func (w *nftWatch) committed(n int, ok bool) {
	w.commits += n
	w.unsure = w.unsure || !ok
}

func (w *nftWatch) expect(want *kernel.Ruleset) {
	touched, generation, known := w.touched, w.generation+uint32(w.commits), !w.unsure && w.prints != nil
	w.touched, w.commits, w.unsure = nil, 0, false
	if !known || !w.follow(want, touched, generation) {
		w.prints = nil
	}
}

// follow reads the chains that kproxy wrote, and reports whether there is in each
// what there should be and all commits up to generation were kproxy's.
func (w *nftWatch) follow(want *kernel.Ruleset, touched map[chainID]bool, generation uint32) bool {
	if now, err := w.readGeneration(); err != nil || now != generation {
		return false
	}
	for id := range touched {
		p, err := w.readChain(id)
		if err != nil || p.rules != rulesOf(want, id) {
			return false
		}
		if key := id.String(); p.rules == 0 {
			delete(w.prints, key)
		} else {
			w.prints[key] = p
		}
	}
	if now, err := w.readGeneration(); err != nil || now != generation {
		return false
	}
	w.generation = generation
	return true
}

// rulesOf is the number of rules that want has in a chain.
func rulesOf(want *kernel.Ruleset, id chainID) int {
	chains := want.Chains[id.family]
	i, ok := slices.BinarySearchFunc(chains, kernel.Chain{Table: id.table, Name: id.name}, kernel.CompareChains)
	if !ok {
		return 0
	}
	return chains[i].Len()
}

func (w *nftWatch) check(_ context.Context, want *kernel.Ruleset) ([]string, error) {
	if w.prints == nil {
		return w.learn(want)
	}
	generation, err := w.readGeneration()
	if err != nil || generation == w.generation || time.Now().Before(w.notBefore) {
		return nil, err
	}
	start := time.Now()
	prints, err := w.readPrints()
	if errors.Is(err, errInterrupted) {
		return nil, nil // the next check sees what came of it
	}
	if err != nil {
		return nil, err
	}
	if damage := comparePrints(prints, w.prints); len(damage) > 0 {
		return damage, nil
	}
	w.generation = generation
	w.notBefore = time.Now().Add(min(restFactor*time.Since(start), restMax))
	return nil, nil
}

// learn takes the rules that there are as the norm, if the number of rules
// in every chain is what it should be.
func (w *nftWatch) learn(want *kernel.Ruleset) ([]string, error) {
	generation, err := w.readGeneration()
	if err != nil {
		return nil, err
	}
	prints, err := w.readPrints()
	if errors.Is(err, errInterrupted) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	expected := map[string]int{}
	for _, f := range w.families {
		for _, c := range want.Chains[f] {
			expected[chainID{f, c.Table, c.Name}.String()] += c.Len()
		}
		for _, j := range want.Jumps[f] {
			expected[chainID{f, j.Table, j.From}.String()]++
		}
	}
	var wrong []string
	for key, n := range expected {
		if prints[key].rules != n {
			wrong = append(wrong, key)
		}
	}
	for key := range prints {
		if expected[key] == 0 {
			wrong = append(wrong, key)
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return some("%s was changed", slices.Compact(wrong)), nil
	}
	w.generation, w.prints = generation, prints
	return nil, nil
}

func comparePrints(have, want map[string]fingerprint) []string {
	var wrong []string
	for key, p := range want {
		if have[key] != p {
			wrong = append(wrong, key)
		}
	}
	for key := range have {
		if _, ok := want[key]; !ok {
			wrong = append(wrong, key)
		}
	}
	slices.Sort(wrong)
	return some("%s was changed", wrong)
}
