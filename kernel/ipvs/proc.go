package ipvs

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

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
func ParseProc(text []byte) ([]Server, error) {
	var out []Server
	known := false // the current virtual server is one that kproxy could know
	for n := 1; len(text) > 0; n++ {
		line, rest, _ := bytes.Cut(text, []byte{'\n'})
		text = rest
		if n <= 3 {
			continue // version and headings
		}
		var err error
		if fields := strings.Fields(string(line)); len(fields) == 0 {
			continue
		} else if fields[0] != "->" {
			out, known, err = appendServer(out, fields)
		} else if known {
			err = out[len(out)-1].addReal(fields)
		}
		if err != nil {
			return nil, fmt.Errorf("parse line %d of %s: %w", n, procPath, err)
		}
	}
	sortServers(out)
	return out, nil
}

// protocols are those that IPVS knows, by the names of /proc/net/ip_vs.
var protocols = map[string]service.Protocol{"TCP": service.TCP, "UDP": service.UDP, "SCTP": service.SCTP}

// appendServer reads "TCP  0A600001:0050 rr persistent 2700000 FFFFFFFF".
func appendServer(out []Server, fields []string) ([]Server, bool, error) {
	p, known := protocols[fields[0]]
	if !known {
		return out, false, nil // by firewall mark (FWM), AH or ESP
	}
	if len(fields) < 3 {
		return out, false, fmt.Errorf("virtual server of %d fields", len(fields))
	}
	a, err := parseProcAddress(fields[1])
	if err != nil {
		return out, false, err
	}
	v := kernel.Virtual{Protocol: p, Address: a, Scheduler: fields[2]}
	if slices.Contains(fields[3:], "persistent") {
		v.Persistence = 1
	}
	return append(out, Server{Virtual: v}), true, nil
}

// addReal reads "-> 0A020002:1F90 Masq 1 0 0".
func (s *Server) addReal(fields []string) error {
	if len(fields) < 6 {
		return fmt.Errorf("real server of %d fields", len(fields))
	}
	a, err := parseProcAddress(fields[1])
	if err != nil {
		return err
	}
	var numbers [3]int
	for i := range numbers {
		if numbers[i], err = strconv.Atoi(fields[3+i]); err != nil {
			return err
		}
	}
	s.Reals = append(s.Reals, kernel.Real{Address: a, Weight: uint32(numbers[0])})
	s.Connections = append(s.Connections, numbers[1]+numbers[2])
	return nil
}

// parseProcAddress reads "0A600001:0050" and "[fd00:0096:0000:0000:0000:0000:0000:0001]:0050".
func parseProcAddress(s string) (netip.AddrPort, error) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return netip.AddrPort{}, fmt.Errorf("address %q has no port", s)
	}
	port, err := strconv.ParseUint(s[i+1:], 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if s[0] == '[' {
		a, err := netip.ParseAddr(strings.Trim(s[:i], "[]"))
		return netip.AddrPortFrom(a, uint16(port)), err
	}
	var b [4]byte
	if len(s[:i]) != hex.EncodedLen(len(b)) {
		return netip.AddrPort{}, fmt.Errorf("address %q", s)
	}
	n, err := strconv.ParseUint(s[:i], 16, 32)
	binary.BigEndian.PutUint32(b[:], uint32(n))
	return netip.AddrPortFrom(netip.AddrFrom4(b), uint16(port)), err
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
