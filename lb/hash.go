package lb

import (
	"encoding/binary"
	"net/netip"
)

// golden is 2^64 divided by the golden ratio, the increment of splitmix64.
const golden = 0x9e3779b97f4a7c15

// mix is the output function of splitmix64 (Steele, Lea, Flood: Fast
// Splittable Pseudorandom Number Generators, OOPSLA 2014): a bijection in
// which every input bit affects every output bit.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// hashAddr hashes a client's address. It has no secret and no seed, so that
// all nodes and all versions of kproxy send a client to the same endpoint. An
// IPv4 address and its IPv4-mapped form are one client; zones don't count.
func hashAddr(a netip.Addr) uint64 {
	b := a.As16()
	return hash16(b, golden)
}

// hashAddrPort hashes an endpoint's address under one of several hash
// functions, told apart by salt.
func hashAddrPort(a netip.AddrPort, salt uint64) uint64 {
	return mix(hash16(a.Addr().As16(), salt) ^ mix(uint64(a.Port())+golden))
}

func hash16(b [16]byte, salt uint64) uint64 {
	h := mix(binary.BigEndian.Uint64(b[:8]) + salt)
	return mix((h ^ binary.BigEndian.Uint64(b[8:])) + golden)
}
