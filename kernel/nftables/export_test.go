package nftables

// Conn names the interface that tests put faults in front of.
type Conn = conn

// Lacking returns a driver whose kernel is what wrap returns.
func Lacking(wrap func(Conn) Conn) *Driver { return &Driver{through: wrap} }

// Through has p speak to the kernel through what wrap returns.
func Through(p *Plane, wrap func(Conn) Conn) { p.tables.socket = wrap(p.tables.socket) }

// Close closes p's sockets.
func Close(p *Plane) { _ = p.tables.close() }

// SweepAtOnce has p keep no chain that isn't used any more.
func SweepAtOnce(p *Plane) { p.tables.spare = 0 }

// KeepSpare has p keep them for as long as it does outside of tests.
func KeepSpare(p *Plane) { p.tables.spare = spare }
