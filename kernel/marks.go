package kernel

import "fmt"

// Marks are the two bits of the packet mark that kproxy uses. They are
// configurable because other programs of the host mark packets as well.
type Marks struct {
	Masquerade  uint32 // the packet leaves with the node's address
	Transparent uint32 // the packet is a reply to a socket that bears a client's address
}

// DefaultMarks returns kube-proxy's masquerade bit and the one above it.
func DefaultMarks() Marks { return Marks{Masquerade: 0x4000, Transparent: 0x8000} }

// Own is the mark of packets that kproxy's own sockets send: both bits, which
// no other packet has.
func (m Marks) Own() uint32 { return m.Masquerade | m.Transparent }

// Validate checks that the marks are one bit each, and different.
func (m Marks) Validate() error {
	for _, bit := range []uint32{m.Masquerade, m.Transparent} {
		if bit == 0 || bit&(bit-1) != 0 {
			return fmt.Errorf("check marks: %#x isn't a single bit", bit)
		}
	}
	if m.Masquerade == m.Transparent {
		return fmt.Errorf("check marks: masquerade and transparent are both %#x", m.Masquerade)
	}
	return nil
}
