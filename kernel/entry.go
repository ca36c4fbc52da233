package kernel

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/service"
)

// element is an entry of a set, taken apart.
type element struct {
	addr  netip.Addr
	bits  int // of a network; 0 for a single address
	proto service.Protocol
	port  uint16
	addr2 netip.Addr
	bits2 int
}

// dimensions says which parts entries of a type have.
type dimensions struct{ addr, network, port, addr2, network2 bool }

var setDimensions = map[SetType]dimensions{
	HashIP:        {addr: true},
	HashNet:       {addr: true, network: true},
	HashIPPort:    {addr: true, port: true},
	HashIPPortIP:  {addr: true, port: true, addr2: true},
	HashIPPortNet: {addr: true, port: true, addr2: true, network2: true},
	BitmapPort:    {port: true},
}

// parseElement reads an entry of a set of type t in the form of `ipset save`.
func parseElement(t SetType, s string) (element, error) {
	d, ok := setDimensions[t]
	if !ok {
		return element{}, fmt.Errorf("parse entry %q: unknown set type %q", s, t)
	}
	var e element
	var err error
	next := func() string {
		part, rest, _ := strings.Cut(s, ",")
		s = rest
		return part
	}
	whole := s
	if d.addr && err == nil {
		e.addr, e.bits, err = parseNetwork(next(), d.network)
	}
	if d.port && err == nil {
		e.proto, e.port, err = parsePort(next(), d.addr)
	}
	if d.addr2 && err == nil {
		e.addr2, e.bits2, err = parseNetwork(next(), d.network2)
	}
	if err == nil && s != "" {
		err = fmt.Errorf("%q is too much", s)
	}
	if err != nil {
		return element{}, fmt.Errorf("parse entry %q of a %s set: %w", whole, t, err)
	}
	return e, nil
}

func parseNetwork(s string, network bool) (netip.Addr, int, error) {
	bits := 0
	if network && strings.Contains(s, "/") {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return netip.Addr{}, 0, err
		}
		if p.Bits() == 0 {
			return netip.Addr{}, 0, fmt.Errorf("%q: sets take no /0", s)
		}
		if !p.IsSingleIP() {
			bits = p.Bits()
		}
		s = p.Addr().String()
	}
	a, err := netip.ParseAddr(s)
	if err == nil && (a.Zone() != "" || a.Is4In6()) {
		err = fmt.Errorf("%q isn't a plain address", s)
	}
	return a, bits, err
}

// parsePort reads "tcp:80", or "80" where a set has ports only.
func parsePort(s string, named bool) (service.Protocol, uint16, error) {
	var proto service.Protocol
	if named {
		name, port, ok := strings.Cut(s, ":")
		if !ok {
			return 0, 0, fmt.Errorf("%q has no protocol", s)
		}
		var err error
		if proto, err = service.ParseProtocol(name); err != nil {
			return 0, 0, err
		}
		s = port
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return proto, uint16(n), err
}

// format prints e as `ipset save` prints an entry of a set of type t.
func (e element) format(t SetType) string {
	d := setDimensions[t]
	b := make([]byte, 0, 48)
	if d.addr {
		b = e.addr.AppendTo(b)
		if e.bits > 0 && e.bits < e.addr.BitLen() {
			b = strconv.AppendInt(append(b, '/'), int64(e.bits), 10)
		}
		if d.port {
			b = append(append(append(b, ','), e.proto.String()...), ':')
		}
	}
	if d.port {
		b = strconv.AppendUint(b, uint64(e.port), 10)
	}
	if d.addr2 {
		b = e.addr2.AppendTo(append(b, ','))
		if e.bits2 > 0 && e.bits2 < e.addr2.BitLen() {
			b = strconv.AppendInt(append(b, '/'), int64(e.bits2), 10)
		}
	}
	return string(b)
}

// CheckEntry reports whether set would take an entry: form and family.
func CheckEntry(set Set, entry string) error {
	e, err := parseElement(set.Type, entry)
	if err != nil {
		return err
	}
	for _, a := range []netip.Addr{e.addr, e.addr2} {
		if a.IsValid() && service.FamilyOf(a) != set.Family {
			return fmt.Errorf("entry %s isn't of the set's family %s", entry, set.Family)
		}
	}
	return nil
}
