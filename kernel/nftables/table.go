package nftables

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// Name is that of kproxy's tables, one in each family. No other table is touched.
const Name = "kproxy"

// Set is a set or a map without its elements.
type Set struct {
	Name, Comment string
	Key, Data     []Type // Data is none in sets
	Verdicts      bool   // it is a map to verdicts
	Timeouts      bool   // elements expire
	Dynamic       bool   // rules add elements
	Intervals     bool   // the last field of the key is a range
}

// Chain is a chain with its rules. One with a Hook is where packets come from.
type Chain struct {
	Name, Type string
	Hook       uint32
	Priority   int32
	Base       bool
	Rules      []Rule
}

// Element is an entry of a set, in the bytes of the kernel.
type Element struct {
	Key, End string // End is the last key of a range; empty for a single one
	Data     string
	Verdict  int32  // of a map to verdicts
	Chain    string // that the verdict leads to
	Comment  string
	Timeout  time.Duration // how long it stays; 0 is for ever
}

// same reports whether both are the same entry with the same meaning.
func (e *Element) same(o *Element) bool {
	return e.End == o.End && e.Data == o.Data && e.Verdict == o.Verdict && e.Chain == o.Chain
}

// flags of s as the kernel takes them.
func (s *Set) flags() uint32 {
	var out uint32
	if len(s.Data) > 0 || s.Verdicts {
		out |= unix.NFT_SET_MAP
	}
	if s.Timeouts {
		out |= unix.NFT_SET_TIMEOUT
	}
	if s.Dynamic {
		out |= unix.NFT_SET_EVAL
	}
	if s.Intervals {
		out |= unix.NFT_SET_INTERVAL
	}
	if len(s.Key) > 1 {
		out |= netlink.SetConcat
	}
	return out
}

// What x/sys/unix doesn't have of linux/netfilter/nf_tables.h.
const (
	tableUserdata      = 6 // NFTA_TABLE_USERDATA
	udataSetComment    = 7 // NFTNL_UDATA_SET_COMMENT of libnftnl
	dynamicElements    = 1 << 20
	elementListAtMost  = 32 << 10 // bytes: an attribute's length is 16 bits
	dataTypeVerdict    = 0xffffff00
	datatypeBits       = 6 // of each field's type in that of a concatenation
	registerAlign      = 4
	userdataComment    = 0 // of tables, rules, chains and elements alike
	userdataHeaderSize = 2
)

// concat is the number of a concatenation's type and its length.
func concat(types []Type) (id, size uint32) {
	for _, t := range types {
		id = id<<datatypeBits | t.id
		size += uint32(t.width())
	}
	if len(types) == 1 {
		size = uint32(types[0].size)
	}
	return id, size
}

// What registers hold of fields, for keys and data; those of a concatenation follow each
// other.

func bytesOf(a netip.Addr) string { return string(a.AsSlice()) }

func protocolBytes(p service.Protocol) string { return string([]byte{byte(p), 0, 0, 0}) }

func portBytes(n uint16) string { return string([]byte{byte(n >> 8), byte(n), 0, 0}) }

func numberBytes(n uint32) string { return string(native(n)) }

// socketBytes are an address and a port.
func socketBytes(a netip.AddrPort) string { return bytesOf(a.Addr()) + portBytes(a.Port()) }

// destination is an address with protocol and port.
func destination(a netip.Addr, p service.Protocol, port uint16) string {
	return string(append(a.AsSlice(), byte(p), 0, 0, 0, byte(port>>8), byte(port), 0, 0))
}

// text prints key or data bytes as nft does.
func text(types []Type, b string) string {
	var words []string
	for _, t := range types {
		n := min(len(b), t.width())
		v := b[:n]
		b = b[n:]
		if n < t.size {
			return "?"
		}
		switch t {
		case typeProto:
			words = append(words, service.Protocol(v[0]).String())
		case typePort:
			words = append(words, fmt.Sprint(binary.BigEndian.Uint16([]byte(v))))
		case typeMark:
			words = append(words, fmt.Sprintf("0x%08x", binary.NativeEndian.Uint32([]byte(v))))
		default:
			a, _ := netip.AddrFromSlice([]byte(v))
			words = append(words, a.String())
		}
	}
	return strings.Join(words, " . ")
}

// textOf prints an element of s as nft does.
func (s *Set) textOf(e *Element) string {
	out := text(s.Key, e.Key)
	if e.End != "" {
		at, last := strings.LastIndex(out, " . ")+1, text(s.Key, e.End)
		if at > 0 {
			at += len(". ")
		}
		from, _ := netip.ParseAddr(out[at:])
		to, _ := netip.ParseAddr(last[min(at, len(last)):])
		out = out[:at] + rangeText(from, to)
	}
	if e.Timeout > 0 {
		out += " timeout " + e.Timeout.String()
	}
	if e.Comment != "" {
		out += fmt.Sprintf(" comment %q", e.Comment)
	}
	switch {
	case s.Verdicts:
		out += " : " + strings.TrimSpace(verdictWords[e.Verdict]+" "+e.Chain)
	case len(s.Data) > 0:
		out += " : " + text(s.Data, e.Data)
	}
	return out
}

// rangeText prints the network from one address to another, which are its ends.
func rangeText(from, to netip.Addr) string {
	for bits := 0; bits <= from.BitLen(); bits++ {
		if p := netip.PrefixFrom(from, bits); p.Masked().Addr() == from && lastOf(p) == to {
			if p.IsSingleIP() {
				break
			}
			return p.String()
		}
	}
	return from.String()
}

// lastOf is the last address of a network.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// header appends struct nfgenmsg and a message's table.
func header(b []byte, kind, flags uint16, f service.Family) []byte {
	b = netlink.AppendRequest(b, unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags)
	return netlink.AppendNetfilter(b, f.Number())
}

// message appends one of nf_tables; the table's name has the same number in all but
// messages about tables, where it is the first attribute as well.
func message(kind, flags uint16, f service.Family, more func([]byte) []byte) []byte {
	b := netlink.AppendText(header(nil, kind, flags, f), 1, Name)
	if more != nil {
		b = more(b)
	}
	return b
}

// userdata appends an attribute with a comment, as nft keeps it: type, length, text.
func userdata(b []byte, typ uint16, kind byte, text string) []byte {
	if text == "" {
		return b
	}
	text = text[:min(len(text), 127)] // NFTNL_UDATA_COMMENT_MAXLEN is 128 with its NUL
	v := append([]byte{kind, byte(len(text) + 1)}, text...)
	return netlink.Append(b, typ, append(v, 0)...)
}

// userdataText is the text of what userdata appended.
func userdataText(b []byte) string {
	if len(b) < userdataHeaderSize {
		return ""
	}
	return netlink.Text(b[userdataHeaderSize:])
}

// newTable makes the table, if there is none. Its comment says which layout it has.
func newTable(f service.Family, about string) []byte {
	return message(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, f, func(b []byte) []byte {
		return userdata(b, tableUserdata, userdataComment, about)
	})
}

func deleteTable(f service.Family) []byte { return message(unix.NFT_MSG_DELTABLE, 0, f, nil) }

func newCounter(f service.Family, name string) []byte {
	return message(unix.NFT_MSG_NEWOBJ, unix.NLM_F_CREATE, f, func(b []byte) []byte {
		b = netlink.AppendText(b, unix.NFTA_OBJ_NAME, name)
		b = netlink.AppendUint32(b, unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_COUNTER)
		return netlink.AppendNested(b, unix.NFTA_OBJ_DATA, func(b []byte) []byte { return b })
	})
}

func newChain(f service.Family, c *Chain) []byte {
	return message(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, f, func(b []byte) []byte {
		b = netlink.AppendText(b, unix.NFTA_CHAIN_NAME, c.Name)
		if !c.Base {
			return b
		}
		b = netlink.AppendNested(b, unix.NFTA_CHAIN_HOOK, func(b []byte) []byte {
			b = netlink.AppendUint32(b, unix.NFTA_HOOK_HOOKNUM, c.Hook)
			return netlink.AppendUint32(b, unix.NFTA_HOOK_PRIORITY, uint32(c.Priority))
		})
		return netlink.AppendText(b, unix.NFTA_CHAIN_TYPE, c.Type)
	})
}

func deleteChain(f service.Family, name string) []byte {
	return message(unix.NFT_MSG_DELCHAIN, 0, f, func(b []byte) []byte { return netlink.AppendText(b, unix.NFTA_CHAIN_NAME, name) })
}

// flushChain deletes all rules of a chain.
func flushChain(f service.Family, name string) []byte {
	return message(unix.NFT_MSG_DELRULE, 0, f, func(b []byte) []byte { return netlink.AppendText(b, unix.NFTA_RULE_CHAIN, name) })
}

func newRule(f service.Family, chain string, r *Rule) []byte {
	return message(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, f, func(b []byte) []byte {
		b = netlink.AppendText(b, unix.NFTA_RULE_CHAIN, chain)
		b = netlink.AppendNested(b, unix.NFTA_RULE_EXPRESSIONS, func(b []byte) []byte { return append(b, r.Expressions...) })
		return userdata(b, unix.NFTA_RULE_USERDATA, userdataComment, r.Comment)
	})
}

func newSet(f service.Family, s *Set, id uint32) []byte {
	return message(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, f, func(b []byte) []byte {
		typ, size := concat(s.Key)
		b = netlink.AppendText(b, unix.NFTA_SET_NAME, s.Name)
		b = netlink.AppendUint32(b, unix.NFTA_SET_FLAGS, s.flags())
		b = netlink.AppendUint32(b, unix.NFTA_SET_KEY_TYPE, typ)
		b = netlink.AppendUint32(b, unix.NFTA_SET_KEY_LEN, size)
		b = netlink.AppendUint32(b, unix.NFTA_SET_ID, id)
		if s.Verdicts {
			b = netlink.AppendUint32(b, unix.NFTA_SET_DATA_TYPE, dataTypeVerdict)
			b = netlink.AppendUint32(b, unix.NFTA_SET_DATA_LEN, 0)
		} else if len(s.Data) > 0 {
			typ, size := concat(s.Data)
			b = netlink.AppendUint32(b, unix.NFTA_SET_DATA_TYPE, typ)
			b = netlink.AppendUint32(b, unix.NFTA_SET_DATA_LEN, size)
		}
		if s.Dynamic || len(s.Key) > 1 {
			b = netlink.AppendNested(b, unix.NFTA_SET_DESC, func(b []byte) []byte {
				if s.Dynamic {
					b = netlink.AppendUint32(b, unix.NFTA_SET_DESC_SIZE, dynamicElements)
				}
				if len(s.Key) == 1 {
					return b
				}
				return netlink.AppendNested(b, netlink.SetDescConcat, func(b []byte) []byte {
					for _, t := range s.Key {
						b = netlink.AppendNested(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte {
							return netlink.AppendUint32(b, netlink.SetFieldLen, uint32(t.size))
						})
					}
					return b
				})
			})
		}
		return userdata(b, unix.NFTA_SET_USERDATA, udataSetComment, s.Comment)
	})
}

// changeElements adds n elements to a set, or deletes them, in messages that the kernel
// takes. Without elements all of the set are deleted.
func changeElements(f service.Family, kind uint16, s *Set, n int, at func(i int) *Element) [][]byte {
	var out [][]byte
	if kind == unix.NFT_MSG_DELSETELEM && n == 0 {
		return [][]byte{message(kind, 0, f, func(b []byte) []byte { return netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_SET, s.Name) })}
	}
	var flags uint16
	if kind == unix.NFT_MSG_NEWSETELEM {
		flags = unix.NLM_F_CREATE
	}
	for i := 0; i < n; {
		out = append(out, message(kind, flags, f, func(b []byte) []byte {
			b = netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_SET, s.Name)
			return netlink.AppendNested(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b []byte) []byte {
				b = slices.Grow(b, min(elementListAtMost+1024, 128*(n-i)))
				for begin := len(b); i < n && len(b)-begin < elementListAtMost; i++ {
					b = netlink.AppendNested(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte {
						return at(i).append(b, s, kind == unix.NFT_MSG_DELSETELEM)
					})
				}
				return b
			})
		}))
	}
	return out
}

// append appends an element's attributes; to delete one its key is enough.
func (e *Element) append(b []byte, s *Set, bare bool) []byte {
	b = netlink.AppendData(b, unix.NFTA_SET_ELEM_KEY, keyBytes(s.Key, e.Key)...)
	if s.Intervals {
		b = netlink.AppendData(b, netlink.SetElemKeyEnd, keyBytes(s.Key, cmp.Or(e.End, e.Key))...)
	}
	if bare {
		return b
	}
	switch {
	case s.Verdicts:
		b = verdict(b, unix.NFTA_SET_ELEM_DATA, e.Verdict, e.Chain)
	case len(s.Data) > 0:
		b = netlink.AppendData(b, unix.NFTA_SET_ELEM_DATA, keyBytes(s.Data, e.Data)...)
	}
	if e.Timeout > 0 {
		b = netlink.Append(b, unix.NFTA_SET_ELEM_TIMEOUT, binary.BigEndian.AppendUint64(nil, uint64(e.Timeout.Milliseconds()))...)
	}
	return userdata(b, unix.NFTA_SET_ELEM_USERDATA, userdataComment, e.Comment)
}

// keyBytes is a key in the length that a set has: one field alone isn't padded.
func keyBytes(types []Type, key string) []byte {
	if len(types) == 1 {
		return []byte(key)[:types[0].size]
	}
	return []byte(key)
}

// readElements takes elements off the attributes of an answer to NFT_MSG_GETSETELEM.
func readElements(attributes []byte, each func(Element)) {
	for typ, v := range netlink.Attributes(attributes) {
		if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			continue
		}
		for _, element := range netlink.Attributes(v) {
			each(readElement(element))
		}
	}
}

func readElement(attributes []byte) Element {
	var e Element
	for typ, v := range netlink.Attributes(attributes) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			_, b := readData(v)
			e.Key = padded(b)
		case netlink.SetElemKeyEnd:
			_, b := readData(v)
			if e.End = padded(b); e.End == e.Key {
				e.End = ""
			}
		case unix.NFTA_SET_ELEM_DATA:
			kind, b := readData(v)
			if kind == unix.NFTA_DATA_VALUE {
				e.Data = padded(b)
				continue
			}
			for typ, v := range netlink.Attributes(b) {
				switch {
				case typ == unix.NFTA_VERDICT_CODE && len(v) == 4:
					e.Verdict = int32(binary.BigEndian.Uint32(v))
				case typ == unix.NFTA_VERDICT_CHAIN:
					e.Chain = netlink.Text(v)
				}
			}
		case unix.NFTA_SET_ELEM_EXPIRATION:
			if len(v) == 8 {
				e.Timeout = time.Duration(binary.BigEndian.Uint64(v)) * time.Millisecond
			}
		case unix.NFTA_SET_ELEM_USERDATA:
			e.Comment = userdataText(v)
		}
	}
	return e
}

// attribute is the value of one of a nest's; nil without it.
func attribute(nest []byte, typ uint16) []byte {
	for t, v := range netlink.Attributes(nest) {
		if t == typ {
			return v
		}
	}
	return nil
}

func number(b []byte) uint32 {
	if len(b) != 4 {
		return ^uint32(0)
	}
	return binary.BigEndian.Uint32(b)
}

// readData is the first attribute within another: NFTA_DATA_VALUE or _VERDICT.
func readData(b []byte) (kind uint16, v []byte) {
	kind, v, _, _ = netlink.Next(b)
	return kind, v
}

func padded(b []byte) string {
	return string(append(bytes.Clone(b), make([]byte, -len(b)&(registerAlign-1))...))
}

// secondsText prints a time as nft does: 10800 is 3h.
func secondsText(n int) string {
	if n == 0 {
		return "0s"
	}
	var out string
	for _, u := range []struct {
		name string
		n    int
	}{{"d", 86400}, {"h", 3600}, {"m", 60}, {"s", 1}} {
		if n >= u.n {
			out += fmt.Sprintf("%d%s", n/u.n, u.name)
			n %= u.n
		}
	}
	return out
}
