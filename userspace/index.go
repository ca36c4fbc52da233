package userspace

import (
	"hash/maphash"
	"maps"
	"sync/atomic"
)

// indexShards is so many that a shard stays small in a cluster with tens of
// thousands of services: a change copies one shard.
const indexShards = 1024

// index is a map that is read without a lock. Writers copy the shard they
// change; there is one at a time. A reader of one key sees it before or after
// a change.
type index[K comparable, V any] struct {
	seed   maphash.Seed
	shards [indexShards]atomic.Pointer[map[K]V]
}

func newIndex[K comparable, V any]() *index[K, V] { return &index[K, V]{seed: maphash.MakeSeed()} }

func (x *index[K, V]) shard(k K) *atomic.Pointer[map[K]V] {
	return &x.shards[maphash.Comparable(x.seed, k)%indexShards]
}

func (x *index[K, V]) get(k K) (v V, ok bool) {
	if m := x.shard(k).Load(); m != nil {
		v, ok = (*m)[k]
	}
	return v, ok
}

func (x *index[K, V]) set(k K, v V) {
	x.change(k, func(m map[K]V) { m[k] = v })
}

func (x *index[K, V]) delete(k K) {
	x.change(k, func(m map[K]V) { delete(m, k) })
}

func (x *index[K, V]) change(k K, f func(map[K]V)) {
	s := x.shard(k)
	m := map[K]V{}
	if old := s.Load(); old != nil {
		m = maps.Clone(*old)
	}
	f(m)
	s.Store(&m)
}
