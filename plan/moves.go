package plan

// Move is what happens to a service port between two plans.
type Move string

// The moves between userspace and the kernel. A service that is refused, or is
// served again, is not moved.
const (
	NoMove  Move = ""
	Offload Move = "offload"
	Recall  Move = "recall"
	// CatchUp: userspace takes over for the moment that the kernel's rules need to
	// follow a change, or stops doing so.
	CatchUp Move = "catch-up"
)

// Move tells how the service port moves.
func (c Change) Move() Move {
	was, is := c.Was, c.Is
	if was == nil || is == nil || was.DataPlane == is.DataPlane {
		return NoMove
	}
	switch {
	case was.inKernel() && is.DataPlane == Userspace:
		if is.Cause == CauseUpdating {
			return CatchUp
		}
		return Recall
	case was.DataPlane == Userspace && is.inKernel():
		if was.State == StateOffloaded {
			return CatchUp
		}
		return Offload
	}
	return NoMove
}

func (s *Service) inKernel() bool { return s.DataPlane != Userspace && s.DataPlane != None }
