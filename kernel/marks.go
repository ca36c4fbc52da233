package kernel

// Marks are the bits of the packet mark that kproxy uses, one each. They are configurable
// because other programs of the host mark packets as well.
type Marks struct {
	Masquerade  uint32 // the packet leaves with the node's address
	Transparent uint32 // the packet is a reply to a socket that bears a client's address; the bit below is taken too
}

// DefaultMarks returns kube-proxy's masquerade bit, and bits 12 and 11, which
// neither it nor the usual network plugins use.
func DefaultMarks() Marks { return Marks{Masquerade: 0x4000, Transparent: 0x1000} }

// Own is the mark of packets that kproxy's own sockets send: the transparent
// bit and the one below, which no other packet has both of. The masquerade bit
// isn't among them: kube-proxy's rules, and those of the network plugins that
// share its bit, would masquerade kproxy's connections. Nor, by default, is
// 0x8000, which kube-proxy's KUBE-MARK-DROP sets and kubelet's KUBE-FIREWALL
// drops; hosts that were upgraded still have that rule.
func (m Marks) Own() uint32 { return m.Transparent | m.Transparent>>1 }

// Returned is the mark of answers that endpoints on this node send to kproxy: the
// lower bit of the own mark without the other one.
func (m Marks) Returned() uint32 { return m.Own() &^ m.Transparent }

// Accepted is the bit of connections that were let through to endpoints, the
// lower one of the own mark. They bear both bits: rules of others may copy the
// marks of connections to their packets (wg-quick does), and no packet of these
// is an answer to kproxy.
func (m Marks) Accepted() uint32 { return m.Own() &^ m.Transparent }
