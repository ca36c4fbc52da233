package ipvs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

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
	servers := bytes.Count(text, []byte{'\n'}) - reals
	p := procParser{
		schedulers: map[string]string{}, servers: make([]Server, 0, servers), first: make([]int, 0, servers),
		reals: make([]kernel.Real, 0, reals), connections: make([]int, 0, reals),
	}
	for n := 1; len(text) > 0; n++ {
		line, rest, _ := bytes.Cut(text, []byte{'\n'})
		text = rest
		if n <= 3 {
			continue // version and headings
		}
		if err := p.line(line); err != nil {
			return nil, fmt.Errorf("parse line %d of %s: %w", n, procPath, err)
		}
	}
	for i := range p.servers {
		end := len(p.reals)
		if i+1 < len(p.servers) {
			end = p.first[i+1]
		}
		if s := &p.servers[i]; p.first[i] < end {
			s.Reals, s.Connections = p.reals[p.first[i]:end:end], p.connections[p.first[i]:end:end]
		}
	}
	sortServers(p.servers)
	return p.servers, nil
}

type procParser struct {
	servers []Server
	first   []int // of each server's reals
	known   bool  // the current virtual server is one that kproxy could know

	reals       []kernel.Real
	connections []int
	schedulers  map[string]string // their names, so that each is there once
}

var errProc = errors.New("it isn't of the form that the kernel prints")

func (p *procParser) line(line []byte) error {
	first, rest := field(line)
	switch {
	case len(first) == 0:
		return nil
	case string(first) == "->":
		if !p.known {
			return nil
		}
		return p.real(rest)
	}
	return p.server(first, rest)
}

// protocols are those that IPVS knows, by the names of /proc/net/ip_vs.
var protocols = map[string]service.Protocol{"TCP": service.TCP, "UDP": service.UDP, "SCTP": service.SCTP}

// server reads "TCP  0A600001:0050 rr persistent 2700000 FFFFFFFF".
func (p *procParser) server(name, rest []byte) error {
	proto, known := protocols[string(name)]
	if p.known = known; !known {
		return nil // by firewall mark (FWM), AH or ESP
	}
	address, rest := field(rest)
	a, ok := procAddress(address)
	name, rest = field(rest)
	if !ok || len(name) == 0 {
		return errProc
	}
	scheduler, ok := p.schedulers[string(name)]
	if !ok {
		scheduler = string(name)
		p.schedulers[scheduler] = scheduler
	}
	v := kernel.Virtual{Protocol: proto, Address: a, Scheduler: scheduler}
	if bytes.Contains(rest, []byte("persistent")) {
		v.Persistence = 1
	}
	p.servers, p.first = append(p.servers, Server{Virtual: v}), append(p.first, len(p.reals))
	return nil
}

// real reads "0A020002:1F90 Masq 1 0 0".
func (p *procParser) real(rest []byte) error {
	address, rest := field(rest)
	a, ok := procAddress(address)
	_, rest = field(rest)
	var numbers [3]int // weight, active and inactive connections
	for i := range numbers {
		var digits []byte
		digits, rest = field(rest)
		ok = ok && len(digits) > 0 && len(digits) <= 10
		for _, c := range digits {
			ok = ok && c >= '0' && c <= '9'
			numbers[i] = numbers[i]*10 + int(c-'0')
		}
	}
	if !ok {
		return errProc
	}
	p.reals = append(p.reals, kernel.Real{Address: a, Weight: uint32(numbers[0])})
	p.connections = append(p.connections, numbers[1]+numbers[2])
	return nil
}

// field cuts the first word off a line.
func field(line []byte) (word, rest []byte) {
	for len(line) > 0 && line[0] == ' ' {
		line = line[1:]
	}
	if i := bytes.IndexByte(line, ' '); i >= 0 {
		return line[:i], line[i:]
	}
	return line, nil
}

// procAddress reads "0A600001:0050" and "[fd00:0096:0000:0000:0000:0000:0000:0001]:0050".
func procAddress(s []byte) (netip.AddrPort, bool) {
	i := bytes.LastIndexByte(s, ':')
	if i < 0 {
		return netip.AddrPort{}, false
	}
	var a [16]byte
	b, ok := hexBytes(a[:0], s[i+1:])
	if !ok || len(b) != 2 {
		return netip.AddrPort{}, false
	}
	port := binary.BigEndian.Uint16(b)
	b = b[:0]
	if s = s[:i]; len(s) > 2 && s[0] == '[' && s[len(s)-1] == ']' {
		for group := range bytes.SplitSeq(s[1:len(s)-1], []byte{':'}) {
			if b, ok = hexBytes(b, group); !ok || len(group) != 4 || len(b) > len(a) {
				return netip.AddrPort{}, false
			}
		}
		return netip.AddrPortFrom(netip.AddrFrom16(a), port), len(b) == len(a)
	}
	if b, ok = hexBytes(b, s); !ok || len(b) != 4 {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b)), port), true
}

// hexBytes appends the bytes that pairs of hexadecimal digits stand for.
func hexBytes(to, s []byte) ([]byte, bool) {
	if len(s)%2 != 0 {
		return to, false
	}
	for i := 0; i < len(s); i += 2 {
		high, low := digit(s[i]), digit(s[i+1])
		if high > 15 || low > 15 {
			return to, false
		}
		to = append(to, high<<4|low)
	}
	return to, true
}

func digit(c byte) byte {
	switch {
	case c >= '0' && c <= '9':
		return c - '0'
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10
	case c >= 'A' && c <= 'F':
		return c - 'A' + 10
	}
	return 255
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
