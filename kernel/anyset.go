package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

// AnySet is a set as the kernel has it, kproxy's or somebody else's, of any type:
// for who follows packets. It is only ever read.
type AnySet struct {
	Name, Type string // "hash:ip,port"
	Family     service.Family
	Timed      bool // entries have lifetimes
	// Counted says that entries have counters, which rules may ask for.
	Counted bool
	// MarkMask is what marks are compared under (hash:ip,mark).
	MarkMask uint32
	// Masked says that addresses are compared under a mask which isn't a prefix
	// (bitmask), and which isn't read.
	Masked  bool
	Entries []AnyEntry

	netmask int // bits of addresses that entries stand for, if not 0
}

// AnyEntry is an entry of an AnySet. What its set's type doesn't have is zero.
type AnyEntry struct {
	Net, Net2 netip.Prefix
	// Last is the end of a range that begins with Net's address, if that isn't zero.
	Last      netip.Addr
	Protocol  uint8 // of the port; 0 where the set has ports only
	Port      uint16
	Mark      uint32
	Interface string
	Physical  bool   // Interface is a port of a bridge
	Member    string // of a list:set: another set
	NoMatch   bool   // an exception
	MAC       bool   // the entry has a hardware address too, which isn't read
	Remaining uint32 // seconds; 0 for ever, where Timed
}

// ReadAny reads a set of anybody's with its entries. It fails with [ErrNotFound]
// if there is none.
func (s *IPSets) ReadAny(name string) (AnySet, error) {
	msgs, err := s.exchange(nl.IPSET_CMD_LIST, name, nil)
	if err != nil {
		return AnySet{}, fmt.Errorf("read set %s: %w", name, err)
	}
	out := AnySet{Name: name}
	for _, m := range msgs {
		if len(m) < nl.SizeofNfgenmsg {
			return AnySet{}, fmt.Errorf("read set %s: message of %d bytes", name, len(m))
		}
		out.decode(m[nl.SizeofNfgenmsg:])
	}
	return out, nil
}

func (s *AnySet) decode(msg []byte) {
	for typ, value := range nlmsg.Attributes(msg) {
		switch typ {
		case nl.IPSET_ATTR_TYPENAME:
			s.Type = nlmsg.Text(value)
		case nl.IPSET_ATTR_FAMILY:
			if len(value) > 0 && value[0] == unix.AF_INET6 {
				s.Family = service.IPv6
			}
		case nl.IPSET_ATTR_DATA:
			s.decodeHeader(value)
		case nl.IPSET_ATTR_ADT:
			for _, entry := range nlmsg.Attributes(value) {
				s.Entries = append(s.Entries, s.entry(entry))
			}
		}
	}
}

// ipsetBitmask is IPSET_ATTR_BITMASK (Linux 6.3).
const ipsetBitmask = 12

// withCounters is IPSET_FLAG_WITH_COUNTERS (enum ipset_cadt_flags).
const withCounters = 1 << 3

func (s *AnySet) decodeHeader(data []byte) {
	for typ, value := range nlmsg.Attributes(data) {
		switch {
		case typ == nl.IPSET_ATTR_TIMEOUT:
			s.Timed = true
		case typ == nl.IPSET_ATTR_CADT_FLAGS && len(value) == 4:
			s.Counted = binary.BigEndian.Uint32(value)&withCounters != 0
		case typ == nl.IPSET_ATTR_MARKMASK && len(value) == 4:
			// In the host's byte order, unlike all else (mtype_head in
			// net/netfilter/ipset/ip_set_hash_gen.h).
			s.MarkMask = binary.NativeEndian.Uint32(value)
		case typ == nl.IPSET_ATTR_NETMASK && len(value) == 1:
			s.netmask = int(value[0])
		case typ == ipsetBitmask:
			s.Masked = true
		}
	}
}

// Flags of an entry (enum ipset_cadt_flags).
const (
	entryPhysdev = 1 << 1
	entryNoMatch = 1 << 2
)

// entry decodes one entry. An address without a length of its own is that of a
// network where the set compares networks of one length.
func (s *AnySet) entry(data []byte) AnyEntry {
	e, timeout, _ := decodeElement(data)
	bits, bits2 := s.netmask, 0
	if bits == 0 {
		bits = e.addr.BitLen()
	}
	if e.addr2.IsValid() {
		bits2 = e.addr2.BitLen()
	}
	out := AnyEntry{Protocol: uint8(e.proto), Port: e.port, Remaining: timeout}
	for typ, v := range nlmsg.Attributes(data) {
		switch {
		case typ == nl.IPSET_ATTR_IP_TO:
			out.Last = decodeAddr(v)
		case typ == nl.IPSET_ATTR_CIDR && len(v) == 1:
			bits = int(v[0])
		case typ == nl.IPSET_ATTR_CIDR2 && len(v) == 1:
			bits2 = int(v[0])
		case typ == nl.IPSET_ATTR_IFACE:
			out.Interface = nlmsg.Text(v)
		case typ == nl.IPSET_ATTR_NAME:
			out.Member = nlmsg.Text(v)
		case typ == nl.IPSET_ATTR_ETHER:
			out.MAC = true
		case typ == nl.IPSET_ATTR_MARK && len(v) == 4:
			out.Mark = binary.BigEndian.Uint32(v)
		case typ == nl.IPSET_ATTR_CADT_FLAGS && len(v) == 4:
			flags := binary.BigEndian.Uint32(v)
			out.Physical, out.NoMatch = flags&entryPhysdev != 0, flags&entryNoMatch != 0
		}
	}
	out.Net, out.Net2 = netip.PrefixFrom(e.addr, bits), netip.PrefixFrom(e.addr2, bits2)
	return out
}

// Text prints an entry of a set of the given type as ipset does, without options.
func (e AnyEntry) Text(typ string) string {
	_, fields, _ := strings.Cut(typ, ":")
	first := true
	var out []string
	for field := range strings.SplitSeq(fields, ",") {
		switch field {
		case "ip", "net":
			n := e.Net2
			if first {
				n = e.Net
			}
			text := n.String()
			if n.IsSingleIP() {
				text = n.Addr().String()
			}
			if first && e.Last.IsValid() {
				text += "-" + e.Last.String()
			}
			first = false
			out = append(out, text)
		case "port":
			text := strconv.Itoa(int(e.Port))
			if fields != "port" {
				text = service.Protocol(e.Protocol).String() + ":" + text
			}
			out = append(out, text)
		case "mark":
			out = append(out, fmt.Sprintf("%#08x", e.Mark))
		case "iface":
			out = append(out, e.Interface)
		case "set":
			out = append(out, e.Member)
		}
	}
	return strings.Join(out, ",")
}
