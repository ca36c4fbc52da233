package netlink

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Expressions holds the expressions of a rule of nf_tables, one behind the other, as
// NFTA_RULE_EXPRESSIONS does. Registers have four bytes; a longer value is in several that
// follow each other.
type Expressions []byte

// Register is the first one, which comparisons look at.
const Register = unix.NFT_REG32_00

// Add appends an expression (NFTA_EXPR_NAME, NFTA_EXPR_DATA).
func (e *Expressions) Add(name string, attributes func([]byte) []byte) {
	*e = AppendNested(*e, unix.NFTA_LIST_ELEM, func(b []byte) []byte {
		return AppendNested(AppendText(b, unix.NFTA_EXPR_NAME, name), unix.NFTA_EXPR_DATA, attributes)
	})
}

// Numbers appends one whose attributes are 32-bit numbers: type, value, and so on.
func (e *Expressions) Numbers(name string, pairs ...uint32) {
	e.Add(name, func(b []byte) []byte { return appendNumbers(b, pairs) })
}

func appendNumbers(b []byte, pairs []uint32) []byte {
	for i := 0; i < len(pairs); i += 2 {
		b = AppendUint32(b, uint16(pairs[i]), pairs[i+1])
	}
	return b
}

// AppendData appends an attribute with a value (NFTA_DATA_VALUE).
func AppendData(b []byte, typ uint16, v ...byte) []byte {
	return AppendNested(b, typ, func(b []byte) []byte { return Append(b, unix.NFTA_DATA_VALUE, v...) })
}

// Payload loads bytes of a header.
func (e *Expressions) Payload(to, base, offset, size uint32) {
	e.Numbers("payload", unix.NFTA_PAYLOAD_DREG, to, unix.NFTA_PAYLOAD_BASE, base, unix.NFTA_PAYLOAD_OFFSET, offset, unix.NFTA_PAYLOAD_LEN, size)
}

// Compare goes on where Register compares to v so (enum nft_cmp_ops).
func (e *Expressions) Compare(op uint32, v ...byte) {
	e.Add("cmp", func(b []byte) []byte {
		return AppendData(appendNumbers(b, []uint32{unix.NFTA_CMP_SREG, Register, unix.NFTA_CMP_OP, op}), unix.NFTA_CMP_DATA, v...)
	})
}

// Mask makes registers (themselves & and) ^ xor.
func (e *Expressions) Mask(at uint32, and, xor []byte) {
	e.Add("bitwise", func(b []byte) []byte {
		b = appendNumbers(b, []uint32{unix.NFTA_BITWISE_SREG, at, unix.NFTA_BITWISE_DREG, at, unix.NFTA_BITWISE_LEN, uint32(len(and))})
		return AppendData(AppendData(b, unix.NFTA_BITWISE_MASK, and...), unix.NFTA_BITWISE_XOR, xor...)
	})
}

// Lookup finds what registers hold in a set, with more attributes that are numbers.
func (e *Expressions) Lookup(set string, from uint32, more ...uint32) {
	e.Add("lookup", func(b []byte) []byte {
		return appendNumbers(AppendUint32(AppendText(b, unix.NFTA_LOOKUP_SET, set), unix.NFTA_LOOKUP_SREG, from), more)
	})
}

// Limit goes on for so many packets a second, and a burst of more after a pause.
func (e *Expressions) Limit(rate, burst int) {
	e.Add("limit", func(b []byte) []byte {
		b = Append(b, unix.NFTA_LIMIT_RATE, binary.BigEndian.AppendUint64(nil, uint64(rate))...)
		b = Append(b, unix.NFTA_LIMIT_UNIT, binary.BigEndian.AppendUint64(nil, 1)...)
		return AppendUint32(b, unix.NFTA_LIMIT_BURST, uint32(burst))
	})
}

// Immediate puts a value into registers.
func (e *Expressions) Immediate(to uint32, v ...byte) {
	e.Add("immediate", func(b []byte) []byte {
		return AppendData(AppendUint32(b, unix.NFTA_IMMEDIATE_DREG, to), unix.NFTA_IMMEDIATE_DATA, v...)
	})
}
