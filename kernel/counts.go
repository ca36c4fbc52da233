package kernel

// Counts are packets that kproxy's rules have counted since they were written, of
// both address families.
type Counts struct {
	Invalid uint64 // of endpoints, dropped because conntrack can't place them
	Refused uint64 // that began a connection to a service without a usable endpoint, and were refused
	Steered uint64 // that began a connection and were sent to userspace
}

// Add adds what was counted between two readings. A counter that went back was
// written anew in between, and began at 0.
func (c *Counts) Add(was, is Counts) {
	add := func(sum *uint64, was, is uint64) {
		if is < was {
			was = 0
		}
		*sum += is - was
	}
	add(&c.Invalid, was.Invalid, is.Invalid)
	add(&c.Refused, was.Refused, is.Refused)
	add(&c.Steered, was.Steered, is.Steered)
}
