// Package lb chooses an endpoint for a new connection.
//
// [New] makes a [Picker] for a fixed list of targets; when the list changes, a
// new Picker is made. What has to outlive that (the connections an endpoint
// carries) is in a [Load] that the caller owns and hands to both. [Affinity]
// remembers which endpoint a client had. [Slots] and [Probabilities] turn
// weights into the static splits that kernel rules can express.
//
// Everything here is safe for concurrent use, picks in O(1) or O(log n), least
// connections in O(n), and allocates nothing while picking. No lock is shared between two Pickers.
package lb

import (
	"net/netip"
	"sync/atomic"

	"kproxy.dev/kproxy/service"
)

// Target is an endpoint that a Picker may choose.
type Target struct {
	Address netip.AddrPort
	// Weight is the target's share relative to the others'. Targets with
	// weight 0 are never picked, by no algorithm: they drain. Round robin
	// makes no other use of it.
	Weight uint32
	// Load counts the target's connections. Only least connections needs it;
	// nil counts as idle.
	Load *Load
}

// Skip excludes targets from one pick: those already tried and those ejected.
// It is called with a Picker's lock held, so it must be quick and must not use
// the Picker. Implement it on a pointer, and passing it allocates nothing.
type Skip interface {
	Skip(i int) bool
}

// Picker chooses among the targets it was made for. It is safe for concurrent
// use and allocates nothing.
//
// Both methods return an index into the targets, or -1 when no target with a
// weight is left. As long as one is left that skip (which may be nil) doesn't
// exclude, they return one, and the algorithm's proportions hold among those
// that are left. Only the hashing algorithms use the client.
type Picker interface {
	// Pick chooses a target and leaves its Load alone.
	Pick(client netip.Addr, skip Skip) int
	// Acquire chooses a target and acquires its Load, in one step as seen by
	// other Acquires: with least connections, simultaneous connections don't
	// all take the target that was idle a moment ago.
	Acquire(client netip.Addr, skip Skip) int
}

// New returns a Picker over targets. An algorithm it doesn't know is round
// robin.
//
// The seed decides where a rotation starts and what random picks; equal seeds
// give equal sequences, so give each Picker another seed, or every rebuild
// starts at the same endpoint. Source hash and Maglev don't depend on it:
// every node, and the next process, must choose alike.
func New(a service.Algorithm, targets []Target, seed uint64) Picker {
	seed = service.Mix(seed)
	switch a {
	case service.WeightedRoundRobin:
		if equalWeights(targets) {
			return newRoundRobin(targets, seed)
		}
		return newWeighted(targets, seed)
	case service.LeastConnections:
		return newLeastConnections(targets, seed)
	case service.Random:
		return newRandom(targets, seed)
	case service.SourceHash:
		return newSourceHash(targets)
	case service.Maglev:
		return newMaglev(targets)
	}
	return newRoundRobin(targets, seed)
}

// eligible returns the indices of the targets that have a weight.
func eligible(targets []Target) []int32 {
	ids := make([]int32, 0, len(targets))
	for i := range targets {
		if targets[i].Weight > 0 {
			ids = append(ids, int32(i))
		}
	}
	return ids
}

func weightsOf(targets []Target) []uint32 {
	weights := make([]uint32, len(targets))
	for i := range targets {
		weights[i] = targets[i].Weight
	}
	return weights
}

// equalWeights reports whether all weights other than 0 are the same.
func equalWeights(targets []Target) bool {
	var seen uint32
	for i := range targets {
		switch w := targets[i].Weight; {
		case w == 0 || w == seen:
		case seen == 0:
			seen = w
		default:
			return false
		}
	}
	return true
}

// loads are the targets' Loads, for Pickers that only pass them on.
type loads []*Load

func loadsOf(targets []Target) loads {
	l := make(loads, len(targets))
	for i := range targets {
		l[i] = targets[i].Load
	}
	return l
}

// acquire acquires the Load of target i, if there is one, and returns i.
func (l loads) acquire(i int) int {
	if i >= 0 && l[i] != nil {
		l[i].Acquire()
	}
	return i
}

// excluded reports whether skip, which may be nil, excludes target i.
func excluded(skip Skip, i int32) bool { return skip != nil && skip.Skip(int(i)) }

// firstLeft returns the first of ids, counted cyclically from start, that skip
// doesn't exclude, or -1.
func firstLeft(ids []int32, start uint64, skip Skip) int {
	n := uint64(len(ids))
	for k := range n {
		if id := ids[(start+k)%n]; !excluded(skip, id) {
			return int(id)
		}
	}
	return -1
}

// Load counts the connections that an endpoint carries now. It belongs to the
// caller and survives rebuilds of Pickers. The zero value is ready; it must
// not be copied. It is safe for concurrent use.
type Load struct{ active atomic.Int64 }

// Acquire counts one more connection.
func (l *Load) Acquire() { l.active.Add(1) }

// Release counts one connection less; call it once for each Acquire.
func (l *Load) Release() { l.active.Add(-1) }

// Active returns the number of connections.
func (l *Load) Active() int64 { return l.active.Load() }
