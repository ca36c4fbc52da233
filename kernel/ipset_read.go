package kernel

import (
	"encoding/binary"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// AnySet is a set as the kernel has it, kproxy's or another program's, of any type. It is only
// ever read.
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

	timeout uint32 // the default lifetime in seconds, where Timed
	count   int    // of entries
	netmask int    // bits of addresses that entries stand for; -1 for all
}

// ReadAny reads a set of any program with its entries. It fails with [ErrNotFound]
// if there is none.
func (s *IPSets) ReadAny(name string) (AnySet, error) {
	msgs, err := s.exchange(nl.IPSET_CMD_LIST, name, nil)
	out := AnySet{netmask: -1}
	for i := 0; i < len(msgs) && err == nil; i++ {
		err = out.decode(msgs[i])
	}
	if err != nil {
		return AnySet{}, fmt.Errorf("read set %s: %w", name, err)
	}
	return out, nil
}

// decode adds what one message of a LIST answer says. A big set comes in several
// messages; only the first has the header.
func (s *AnySet) decode(msg []byte) error {
	if len(msg) < nl.SizeofNfgenmsg {
		return fmt.Errorf("decode set: message of %d bytes", len(msg))
	}
	for typ, value := range netlink.Attributes(msg[nl.SizeofNfgenmsg:]) {
		switch typ {
		case nl.IPSET_ATTR_SETNAME:
			s.Name = netlink.Text(value)
		case nl.IPSET_ATTR_TYPENAME:
			s.Type = netlink.Text(value)
		case nl.IPSET_ATTR_FAMILY:
			if len(value) > 0 && value[0] == unix.AF_INET6 {
				s.Family = service.IPv6
			}
		case nl.IPSET_ATTR_DATA:
			s.decodeHeader(value)
		case nl.IPSET_ATTR_ADT:
			for _, entry := range netlink.Attributes(value) {
				s.Entries = append(s.Entries, decodeEntry(entry, s.netmask))
			}
		}
	}
	return nil
}

const (
	ipsetBitmask = 12     // IPSET_ATTR_BITMASK (Linux 6.3)
	withCounters = 1 << 3 // IPSET_FLAG_WITH_COUNTERS (enum ipset_cadt_flags)
)

// headerSize is the least length of a value that decodeHeader reads.
var headerSize = map[uint16]int{
	nl.IPSET_ATTR_TIMEOUT: 4, nl.IPSET_ATTR_ELEMENTS: 4, nl.IPSET_ATTR_CADT_FLAGS: 4, nl.IPSET_ATTR_MARKMASK: 4, nl.IPSET_ATTR_NETMASK: 1,
}

func (s *AnySet) decodeHeader(data []byte) {
	for typ, v := range netlink.Attributes(data) {
		if len(v) < headerSize[typ] {
			continue
		}
		switch typ {
		case nl.IPSET_ATTR_TIMEOUT:
			s.Timed, s.timeout = true, binary.BigEndian.Uint32(v)
		case nl.IPSET_ATTR_ELEMENTS:
			s.count = int(binary.BigEndian.Uint32(v))
		case nl.IPSET_ATTR_CADT_FLAGS:
			s.Counted = binary.BigEndian.Uint32(v)&withCounters != 0
		case nl.IPSET_ATTR_MARKMASK:
			// In the host's byte order, unlike all else (mtype_head in
			// net/netfilter/ipset/ip_set_hash_gen.h).
			s.MarkMask = binary.NativeEndian.Uint32(v)
		case nl.IPSET_ATTR_NETMASK:
			s.netmask = int(v[0])
		case ipsetBitmask:
			s.Masked = true
		}
	}
}
