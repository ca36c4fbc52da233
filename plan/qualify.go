package plan

import (
	"time"

	"kproxy.dev/kproxy/service"
)

// flapWindow is the time within which Policy.FlapLimit counts.
const flapWindow = time.Minute

// outcome says which data plane carries a service port at one moment, and why.
type outcome struct {
	plane       DataPlane
	state       State
	reason      string
	cause       Cause
	qualifiesAt time.Time
	wake        time.Time // when time alone changes the above
}

// outcomeOf decides which data plane carries s now, and updates what is remembered of it. The
// order of the questions is the order of precedence.
func (c *computation) outcomeOf(s *Service, f *facts, m *memory) outcome {
	m.observe(f.steady, c.in.Now)
	if f.left != "" {
		return outcome{plane: None, state: StateExcluded, reason: f.left, cause: CauseExcluded}
	}
	if f.refusal != "" {
		// It stays offloaded in memory: endpoints that come back are a change like
		// any other.
		return outcome{plane: None, state: StateRejecting, reason: f.refusal, cause: f.refused}
	}
	if s.Port.Protocol == service.SCTP {
		return c.kernelOnly(s, f, m)
	}
	pin, by := c.pinOf(s.Port)
	switch {
	case pin == service.PreferUserspace:
		// The pin is a person's decision: what the service did before doesn't
		// make it wait when it is unpinned.
		m.forgive()
		return outcome{plane: Userspace, state: StatePinned, reason: "pinned to userspace by " + by, cause: CausePinned}
	case s.Kernel == None:
		m.forgive()
		return outcome{plane: Userspace, state: StateUserspace, reason: c.kernel.why, cause: CauseNoKernel}
	case f.inexpressible != "":
		m.forgive()
		return outcome{plane: Userspace, state: StateUserspace, reason: f.inexpressible, cause: CauseInexpressible}
	}
	failure := c.recallFailed(s, m)
	if pin == service.PreferKernel {
		if m.waitHash != 0 && c.in.Now.Before(m.waitUntil) {
			return c.waiting(m)
		}
		m.stopWaiting()
		return c.offloaded(s, m, outcome{state: StatePinned, reason: "pinned to the kernel by " + by + f.choice(), cause: CausePinned}, failure)
	}
	c.recallFlapping(s, f, m)
	if m.offloaded {
		return c.offloaded(s, m, f.offloaded(), failure)
	}
	return c.qualifying(s, f, m, failure)
}

// kernelOnly is for SCTP, which userspace can't serve.
func (c *computation) kernelOnly(s *Service, f *facts, m *memory) outcome {
	m.offload(c.in.Now)
	out := outcome{plane: s.Kernel, state: StateOffloaded, reason: reasonKernelOnly + f.choice(), cause: CauseKernelOnly}
	failure, failed := c.in.Failed[s.Port.Key]
	switch {
	case failed && failure.Hash == s.KernelHash:
		out.reason, out.cause = failureText(failure.Reason), CauseRulesFailed
	case !c.programmed(s):
		out.reason, out.cause = reasonUpdating, CauseUpdating
	case f.inexpressible != "":
		out.reason += "; " + f.inexpressible
	}
	return out
}

// offloaded is for a service that leaves userspace, or has left it. While the kernel's
// rules aren't those of this plan, userspace serves it for them.
func (c *computation) offloaded(s *Service, m *memory, out outcome, failure string) outcome {
	switch {
	case c.programmed(s):
		m.offload(c.in.Now)
		out.plane = s.Kernel
		return out
	case m.offloaded:
		out.reason, out.cause = orFailure(failure, reasonUpdating, CauseUpdating)
	default:
		out.reason, out.cause = orFailure(failure, reasonWriting, CauseWriting)
	}
	out.plane = Userspace
	return out
}

// orFailure returns why rules aren't there: that they could not be programmed, or, without
// a failure, the reason given.
func orFailure(failure, reason string, cause Cause) (string, Cause) {
	if failure != "" {
		return failure, CauseRulesFailed
	}
	return reason, cause
}

// waiting is for a recalled service during its back-off.
func (c *computation) waiting(m *memory) outcome {
	return outcome{plane: Userspace, state: StateRecalled, reason: m.waitReason, cause: m.waitCause, wake: m.waitUntil}
}

// qualifying is for a service that only has to fulfil the conditions.
func (c *computation) qualifying(s *Service, f *facts, m *memory, failure string) outcome {
	p := &c.in.Policy
	steadyAt := m.steadySince.Add(p.OffloadAfter)
	ready := f.panic == "" && c.in.Observed.Carried[s.Port.Key] >= p.OffloadMinConnections
	if c.in.Now.Before(m.waitUntil) {
		out := c.waiting(m)
		if ready && m.waitHash == 0 {
			out.qualifiesAt = later(m.waitUntil, steadyAt)
		}
		return out
	}
	out := outcome{plane: Userspace, state: StateQualifying}
	switch {
	case f.panic != "":
		out.reason, out.cause = f.panic, CausePanic
	case !ready:
		out.reason, out.cause = carryText(p), CauseFew
	case c.in.Now.Before(steadyAt):
		out.reason, out.cause = "its endpoints must stay as they are for "+durationText(p.OffloadAfter), CauseUnsteady
		out.qualifiesAt, out.wake = steadyAt, steadyAt
	case !c.programmed(s):
		out.reason, out.cause = orFailure(failure, reasonWriting, CauseWriting)
	default:
		return c.offloaded(s, m, f.offloaded(), failure)
	}
	return out
}

// recallFailed recalls s if its present rules could not be programmed and this
// wasn't known before, and lets new rules be tried at once. It returns the
// failure in force; empty if there is none.
func (c *computation) recallFailed(s *Service, m *memory) string {
	failure, failed := c.in.Failed[s.Port.Key]
	if m.waitHash != 0 && m.waitHash != s.KernelHash {
		m.stopWaiting()
	}
	if !failed || failure.Hash != s.KernelHash {
		return ""
	}
	text := failureText(failure.Reason)
	if failure.Since.Equal(m.failedAt) {
		return text
	}
	m.recall(failure.Since, c.in.Policy.BackoffMax)
	m.failedAt, m.waitHash, m.waitReason, m.waitCause = failure.Since, s.KernelHash, text, CauseRulesFailed
	return text
}

// recallFlapping recalls an offloaded service whose endpoints changed health too
// often since it was offloaded: in userspace a connection that fails is tried
// on another endpoint, so that clients don't see it. A dual-stack endpoint that
// goes down does so once in each family, so families are counted apart.
func (c *computation) recallFlapping(s *Service, f *facts, m *memory) {
	if !m.offloaded || len(f.flaps) <= c.in.Policy.FlapLimit {
		return
	}
	since := later(m.offloadedAt, c.in.Now.Add(-flapWindow))
	var changes, endpoints [2]int
	last := -1
	for _, fl := range f.flaps { // in order of their rows
		if !fl.at.After(since) {
			continue
		}
		fam := service.FamilyOf(s.Endpoints[fl.row].Address.Addr())
		changes[fam]++
		if fl.row != last {
			endpoints[fam]++
			last = fl.row
		}
	}
	fam := service.IPv4
	if changes[service.IPv6] > changes[service.IPv4] {
		fam = service.IPv6
	}
	if changes[fam] <= c.in.Policy.FlapLimit {
		return
	}
	m.recall(c.in.Now, c.in.Policy.BackoffMax)
	m.waitHash = 0
	m.waitCause, m.waitReason = CauseFlapping, flapText(endpoints[fam], changes[fam], m.backoff)
}

// programmed reports whether the kernel holds the rules that s needs now, or will when the plan is followed.
func (c *computation) programmed(s *Service) bool {
	if c.in.Observed.InStep && c.kernel.any(func(a *Abilities) bool { return a.Plane == s.Kernel && a.Atomic }) {
		f, failed := c.in.Failed[s.Port.Key]
		return !failed || f.Hash != s.KernelHash
	}
	h, ok := c.in.Observed.Programmed[s.Port.Key]
	return ok && h == s.KernelHash
}

// pinOf returns what a user wants for p and what says so.
func (c *computation) pinOf(p *service.Port) (service.Preference, string) {
	if by := c.in.Policy.DrainedBy; by != "" {
		return service.PreferKernel, by
	}
	if pin, ok := c.in.Pins[p.Key]; ok {
		return pin, "kproxy pin"
	}
	return p.Prefer, "its annotation"
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Back-off of requalification, as README says: 10s, 20s, 40s and so on
// up to Policy.BackoffMax.
const (
	firstBackoff = 10 * time.Second
	// calmAfter is how long a service must have been offloaded for its next
	// recall to start again at firstBackoff.
	calmAfter = 10 * time.Minute
)

// memory holds what the next Compute needs to know of a service port besides its
// inputs: Compute has no state of its own.
type memory struct {
	offloaded   bool
	offloadedAt time.Time

	// steadyHash is the facts.steady that steadySince is about.
	steadyHash  uint64
	steadySince time.Time

	// A recalled service waits. waitHash is the KernelHash whose failure it
	// waits for; 0 where it waits for another reason.
	waitUntil  time.Time
	waitReason string
	waitCause  Cause
	waitHash   uint64
	failedAt   time.Time // Failure.Since of the failure that was last acted on
	backoff    time.Duration
}

// observe starts the clock of steadiness again where h differs.
func (m *memory) observe(h uint64, now time.Time) {
	if m.steadyHash != h || m.steadySince.IsZero() {
		m.steadyHash, m.steadySince = h, now
	}
}

// offload notes that the service is offloaded from now, if it wasn't.
func (m *memory) offload(now time.Time) {
	if !m.offloaded {
		m.offloaded, m.offloadedAt = true, now
	}
	m.stopWaiting()
}

// recall takes the service back at the moment given and makes it wait, twice
// as long as the last time.
func (m *memory) recall(at time.Time, longest time.Duration) {
	if m.offloaded && at.Sub(m.offloadedAt) >= calmAfter {
		m.backoff = 0
	}
	m.backoff = min(max(2*m.backoff, firstBackoff), longest)
	m.offloaded = false
	m.waitUntil = at.Add(m.backoff)
}

// stopWaiting ends a wait; the back-off is remembered.
func (m *memory) stopWaiting() {
	m.waitUntil, m.waitReason, m.waitCause, m.waitHash = time.Time{}, "", "", 0
}

// forgive makes the service as one that was never offloaded nor recalled.
func (m *memory) forgive() {
	m.offloaded, m.backoff, m.failedAt = false, 0, time.Time{}
	m.stopWaiting()
}
