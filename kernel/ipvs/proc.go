package ipvs

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// procPath is IPVS's table of the calling thread's network namespace.
const procPath = "/proc/thread-self/net/ip_vs"

// ParseProc reads /proc/net/ip_vs as ip_vs_info_seq_show prints it
// (net/netfilter/ipvs/ip_vs_ctl.c). It holds the real servers of every virtual
// server in one text, where netlink takes a request for each; but scheduler
// flags aren't in it, and persistence is in ticks of a length that isn't told.
// Both are 0 here, persistence 1 where there is some.
//
// The Watch has it read every two seconds, so it allocates little.
func ParseProc(text []byte) ([]Server, error) {
	reals := bytes.Count(text, []byte("\n  -> "))
	p := procParser{
		schedulers: map[string]string{}, servers: make([]Server, 0, bytes.Count(text, []byte{'\n'})-reals),
		reals: make([]kernel.Real, 0, reals), connections: make([]int, 0, reals),
	}
	n := 0
	for line := range bytes.Lines(text) {
		if n++; n <= 3 {
			continue // version and headings
		}
		if !p.line(bytes.TrimSuffix(line, []byte{'\n'})) {
			return nil, fmt.Errorf("parse line %d of %s: %w", n, procPath, errProc)
		}
	}
	sortServers(p.servers)
	return p.servers, nil
}

type procParser struct {
	servers []Server
	known   bool // the current virtual server is one that kproxy could know
	begin   int  // of its reals

	reals       []kernel.Real
	connections []int
	schedulers  map[string]string // their names, so that each is there once
}

var errProc = errors.New("it isn't of the form that the kernel prints")

func (p *procParser) line(line []byte) bool {
	first, rest := field(line)
	switch {
	case len(first) == 0:
		return true
	case string(first) == "->":
		return !p.known || p.real(rest)
	}
	return p.server(first, rest)
}

// protocols are those that IPVS knows, by the names of /proc/net/ip_vs.
var protocols = map[string]service.Protocol{"TCP": service.TCP, "UDP": service.UDP, "SCTP": service.SCTP}

// server reads "TCP  0A600001:0050 rr persistent 2700000 FFFFFFFF".
func (p *procParser) server(name, rest []byte) bool {
	v := kernel.Virtual{}
	if v.Protocol, p.known = protocols[string(name)]; !p.known {
		return true // by firewall mark (FWM), AH or ESP
	}
	address, rest := field(rest)
	name, rest = field(rest)
	var ok bool
	if v.Address, ok = hexAddrPort(address); !ok || len(name) == 0 {
		return false
	}
	if v.Scheduler, ok = p.schedulers[string(name)]; !ok {
		v.Scheduler = string(name)
		p.schedulers[v.Scheduler] = v.Scheduler
	}
	if bytes.Contains(rest, []byte("persistent")) {
		v.Persistence = 1
	}
	p.servers, p.begin = append(p.servers, Server{Virtual: v}), len(p.reals)
	return true
}

// real reads "0A020002:1F90 Masq 1 0 0".
func (p *procParser) real(rest []byte) bool {
	address, rest := field(rest)
	a, ok := hexAddrPort(address)
	_, rest = field(rest)
	var numbers [3]uint64 // weight, active and inactive connections
	for i := range numbers {
		var digits []byte
		digits, rest = field(rest)
		n, err := strconv.ParseUint(string(digits), 10, 32)
		numbers[i], ok = n, ok && err == nil
	}
	if !ok {
		return false
	}
	p.reals = append(p.reals, kernel.Real{Address: a, Weight: uint32(numbers[0])})
	p.connections = append(p.connections, int(numbers[1]+numbers[2]))
	s, end := &p.servers[len(p.servers)-1], len(p.reals)
	s.Reals, s.Connections = p.reals[p.begin:end:end], p.connections[p.begin:end:end]
	return true
}

// field cuts the first word off a line.
func field(line []byte) (word, rest []byte) {
	line = bytes.TrimLeft(line, " ")
	if i := bytes.IndexByte(line, ' '); i >= 0 {
		return line[:i], line[i:]
	}
	return line, nil
}

// hexAddrPort reads "0A600001:0050" and "[fd00:0096:0000:0000:0000:0000:0000:0001]:0050".
func hexAddrPort(s []byte) (netip.AddrPort, bool) {
	i := max(0, bytes.LastIndexByte(s, ':'))
	a, okAddress := hexAddr(bytes.Trim(s[:i], "[]"))
	port, okPort := hexPort(s[min(i+1, len(s)):])
	return netip.AddrPortFrom(a, port), okAddress && okPort
}

// hexAddr reads "0A010002" and "fd00:0001:0000:0000:0000:0000:0000:0002".
func hexAddr(s []byte) (netip.Addr, bool) {
	var v4 [4]byte
	if len(s) == hex.EncodedLen(len(v4)) && bytes.IndexByte(s, ':') < 0 {
		_, err := hex.Decode(v4[:], s)
		return netip.AddrFrom4(v4), err == nil
	}
	a, err := netip.ParseAddr(string(s))
	return a, err == nil && a.Is6()
}

func hexPort(s []byte) (uint16, bool) {
	var b [2]byte
	if len(s) != hex.EncodedLen(len(b)) {
		return 0, false
	}
	_, err := hex.Decode(b[:], s)
	return binary.BigEndian.Uint16(b[:]), err == nil
}

// sortServers brings virtual servers, and each one's real servers, in order.
func sortServers(servers []Server) {
	for i := range servers {
		servers[i].sortReals()
	}
	slices.SortFunc(servers, func(a, b Server) int { return kernel.CompareVirtuals(a.Virtual, b.Virtual) })
}

func (s *Server) sortReals() {
	byAddress := func(a, b kernel.Real) int { return a.Address.Compare(b.Address) }
	if slices.IsSortedFunc(s.Reals, byAddress) {
		return
	}
	counts := make(map[netip.AddrPort]int, len(s.Reals))
	for i, r := range s.Reals {
		counts[r.Address] = s.Connections[i]
	}
	slices.SortFunc(s.Reals, byAddress)
	for i, r := range s.Reals {
		s.Connections[i] = counts[r.Address]
	}
}
