package lb

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"
	"sync"

	"kproxy.dev/kproxy/service"
)

// golden is 2^64 divided by the golden ratio, the increment of splitmix64.
const golden = 0x9e3779b97f4a7c15

// hashAddr hashes a client's address. It has no secret and no seed, so that
// all nodes and all versions of kproxy send a client to the same endpoint. An
// IPv4 address and its IPv4-mapped form are one client; zones don't count.
func hashAddr(a netip.Addr) uint64 {
	b := a.As16()
	return hash16(b, golden)
}

// hashAddrPort hashes an endpoint's address under one of several hash
// functions, chosen by salt.
func hashAddrPort(a netip.AddrPort, salt uint64) uint64 {
	return service.Mix(hash16(a.Addr().As16(), salt) ^ service.Mix(uint64(a.Port())+golden))
}

func hash16(b [16]byte, salt uint64) uint64 {
	h := service.Mix(binary.BigEndian.Uint64(b[:8]) + salt)
	return service.Mix((h ^ binary.BigEndian.Uint64(b[8:])) + golden)
}

// SourceSlot is the slot of n that a client's address leads to, from 0 on: what nftables'
// `jhash ip saddr mod n seed 0x1` computes (SourceSeed), so that a client has one endpoint in
// userspace and in the kernel.
func SourceSlot(client netip.Addr, n int) int {
	at, _ := bits.Mul32(JHash(client.Unmap().WithZone("").AsSlice(), SourceSeed), uint32(n))
	return int(at)
}

// SourceSeed is the seed of SourceSlot. It is the same on every node and in every version.
const SourceSeed = 1

// JHash is the kernel's jhash (include/linux/jhash.h), which is Bob Jenkins's lookup3: of
// bytes in the order in which they are in memory.
func JHash(key []byte, seed uint32) uint32 {
	a := 0xdeadbeef + uint32(len(key)) + seed
	b, c := a, a
	rol := bits.RotateLeft32
	for ; len(key) > 12; key = key[12:] {
		a += binary.NativeEndian.Uint32(key)
		b += binary.NativeEndian.Uint32(key[4:])
		c += binary.NativeEndian.Uint32(key[8:])
		a, c = (a-c)^rol(c, 4), c+b
		b, a = (b-a)^rol(a, 6), a+c
		c, b = (c-b)^rol(b, 8), b+a
		a, c = (a-c)^rol(c, 16), c+b
		b, a = (b-a)^rol(a, 19), a+c
		c, b = (c-b)^rol(b, 4), b+a
	}
	if len(key) == 0 {
		return c
	}
	var rest [12]byte
	copy(rest[:], key)
	a += binary.LittleEndian.Uint32(rest[:])
	b += binary.LittleEndian.Uint32(rest[4:])
	c += binary.LittleEndian.Uint32(rest[8:])
	c = (c ^ b) - rol(b, 14)
	a = (a ^ c) - rol(c, 11)
	b = (b ^ a) - rol(a, 25)
	c = (c ^ b) - rol(b, 16)
	a = (a ^ c) - rol(c, 4)
	b = (b ^ a) - rol(a, 14)
	return (c ^ b) - rol(b, 24)
}

// maglevSize is the size of the lookup table: a prime, and the smaller one of
// the two sizes in section 5.3 of Eisenbud et al.: Maglev: A Fast and Reliable
// Software Network Load Balancer, NSDI 2016.
const maglevSize = 65537

// maglevTries is how many slots a client is sent to before the targets that
// are left are searched one by one.
const maglevTries = 16

// maglev is consistent hashing by lookup table: when a target goes, its
// clients spread over the others and few others move. The table depends only
// on the set of addresses and weights, so every node chooses alike.
//
// A table takes 256 KiB and a few milliseconds to make. It is made by the first pick:
// most services of a big cluster never carry a connection in userspace.
type maglev struct {
	loads
	targets []Target
	ids     []int32
	once    sync.Once
	table   []int32
}

func newMaglev(targets []Target) *maglev {
	return &maglev{loads: loadsOf(targets), targets: slices.Clone(targets), ids: eligible(targets)}
}

// Pick looks the client up. Where its target is excluded, further slots are
// looked up under further hashes of the client, so that an ejected endpoint's
// clients spread over all others, and no other moves.
func (p *maglev) Pick(c netip.Addr, skip Skip) int {
	if len(p.ids) == 0 {
		return -1
	}
	p.once.Do(func() { p.table = maglevTable(p.targets) })
	h := hashAddr(c)
	for range maglevTries {
		if id := p.table[h%maglevSize]; !excluded(skip, id) {
			return int(id)
		}
		h = service.Mix(h + golden)
	}
	return firstLeft(p.ids, h%uint64(len(p.ids)), skip)
}

func (p *maglev) Acquire(c netip.Addr, skip Skip) int { return p.acquire(p.Pick(c, skip)) }

// maglevTable populates the lookup table as section 3.4 of the paper describes:
// every target has its own permutation of the slots, and at each of its turns
// takes the first one that is still free. Weights decide how often its turn
// comes. The targets take turns in order of address, whatever order they are
// given in.
func maglevTable(targets []Target) []int32 {
	ids := eligible(targets)
	slices.SortFunc(ids, func(a, b int32) int { return targets[a].Address.Compare(targets[b].Address) })
	next, skip, weights := make([]uint32, len(ids)), make([]uint32, len(ids)), make([]uint32, len(ids))
	order := make([]int32, len(ids))
	for i, id := range ids {
		order[i], weights[i] = int32(i), targets[id].Weight
		next[i] = uint32(hashAddrPort(targets[id].Address, 1) % maglevSize)
		skip[i] = uint32(hashAddrPort(targets[id].Address, 2)%(maglevSize-1)) + 1
	}
	var turns schedule
	turns.init(weights, order, 0)
	table := make([]int32, maglevSize)
	for i := range table {
		table[i] = -1
	}
	equal := equalWeights(targets)
	for k := range table {
		i := int32(k % len(ids))
		if !equal {
			i = turns.next(nil)
		}
		for table[next[i]] >= 0 {
			next[i] = (next[i] + skip[i]) % maglevSize
		}
		table[next[i]] = ids[i]
	}
	return table
}
