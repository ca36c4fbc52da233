// Package netlink reads and writes attributes of netlink's messages, and has a [Socket] on
// which many requests go to the kernel at once: vishvananda/netlink, which kproxy uses for
// links, addresses and routes, takes a message, an allocation or a system call for each.
//
// Functions on attributes are pure; a Socket is for one goroutine at a time.
package netlink

import (
	"bytes"
	"encoding/binary"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Flags in the type of an attribute (linux/netlink.h).
const (
	Nested       = unix.NLA_F_NESTED
	NetByteOrder = unix.NLA_F_NET_BYTEORDER
)

// Next takes the first attribute off b, its type without flags; ok is false at the
// end, and where the attribute is cut short, which leaves a rest.
func Next(b []byte) (typ uint16, value, rest []byte, ok bool) {
	if len(b) < unix.SizeofNlAttr {
		return 0, nil, nil, false
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < unix.SizeofNlAttr || n > len(b) {
		return 0, nil, b, false
	}
	typ = binary.NativeEndian.Uint16(b[2:]) &^ (Nested | NetByteOrder)
	return typ, b[unix.SizeofNlAttr:n], b[min(len(b), align(n)):], true
}

// Attributes iterates over attributes, to the first that is cut short.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for {
			typ, value, rest, ok := Next(b)
			if !ok || !yield(typ, value) {
				return
			}
			b = rest
		}
	}
}

// Text is a string attribute: up to its NUL, if it has one.
func Text(b []byte) string {
	s, _, _ := bytes.Cut(b, []byte{0})
	return string(s)
}

func align(n int) int { return (n + 3) &^ 3 }

// Append appends an attribute, padded.
func Append(b []byte, typ uint16, value ...byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofNlAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, value...)
	return append(b, make([]byte, -len(value)&3)...)
}

// AppendNested appends an attribute that holds those which content appends.
func AppendNested(b []byte, typ uint16, content func([]byte) []byte) []byte {
	at := len(b)
	b = content(Append(b, typ|Nested))
	binary.NativeEndian.PutUint16(b[at:], uint16(len(b)-at))
	return b
}

// AppendText appends a string with its NUL.
func AppendText(b []byte, typ uint16, s string) []byte {
	return Append(b, typ, append([]byte(s), 0)...)
}

// AppendAddr appends an address.
func AppendAddr(b []byte, typ uint16, a netip.Addr) []byte {
	return Append(b, typ, a.AsSlice()...)
}

// AppendUint16 and AppendUint32 append numbers in network byte order, which
// netfilter has; AppendNative one in the machine's, which generic netlink has.

func AppendUint16(b []byte, typ, v uint16) []byte { return Append(b, typ, byte(v>>8), byte(v)) }

func AppendUint32(b []byte, typ uint16, v uint32) []byte {
	return Append(b, typ, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
}

func AppendNative(b []byte, typ uint16, v uint32) []byte {
	return Append(b, typ, binary.NativeEndian.AppendUint32(nil, v)...)
}

// AppendNetfilter appends struct nfgenmsg, which begins the messages of netfilter.
func AppendNetfilter(b []byte, family byte) []byte {
	return append(b, family, unix.NFNETLINK_V0, 0, 0)
}

// SizeofNetfilter is the length of struct nfgenmsg.
const SizeofNetfilter = 4
