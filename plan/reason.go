package plan

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/service"
)

// Cause is a Reason without its particulars: one of a few words that metrics and
// alerts can go by, where the Reason is a sentence for people.
type Cause string

// The causes of where a service is, by data plane.
const (
	// In a kernel data plane.
	CauseQualified  Cause = "qualified"
	CauseKernelOnly Cause = "kernel-only" // only the kernel can serve its protocol

	// In either, because a user said so.
	CausePinned Cause = "pinned"

	// In userspace for a moment.
	CauseUpdating Cause = "rules-updating" // the kernel's rules follow a change
	CauseWriting  Cause = "rules-writing"  // it qualifies or is pinned, its rules aren't written yet
	CauseFew      Cause = "few-connections"
	CauseUnsteady Cause = "not-steady" // it changed less than Policy.OffloadAfter ago

	// In userspace because something isn't right.
	CauseRulesFailed Cause = "rules-failed" // the kernel refused its rules
	CauseFlapping    Cause = "endpoints-flapping"
	CausePanic       Cause = "endpoints-down" // so many that those are served too

	// In userspace for good.
	CauseNoKernel      Cause = "no-kernel-data-plane" // of the mode, or on this host
	CauseInexpressible Cause = "kernel-cannot"        // the kernel can't do what it asks for

	// Not served.
	CauseNoAddress  Cause = "no-address"
	CauseNoEndpoint Cause = "no-endpoint"
	CauseNotReady   Cause = "no-ready-endpoint"
	CauseNoWeight   Cause = "no-weight"
	CauseNotLocal   Cause = "no-local-endpoint"
	CauseNoFamily   Cause = "no-endpoint-of-family"
	CauseUnservable Cause = "unservable" // nothing here can serve its protocol
	CauseExcluded   Cause = "other-proxy"
)

// Causes are all of them.
var Causes = []Cause{
	CauseQualified, CauseKernelOnly, CausePinned,
	CauseUpdating, CauseWriting, CauseFew, CauseUnsteady,
	CauseRulesFailed, CauseFlapping, CausePanic,
	CauseNoKernel, CauseInexpressible,
	CauseNoAddress, CauseNoEndpoint, CauseNotReady, CauseNoWeight, CauseNotLocal, CauseNoFamily, CauseUnservable, CauseExcluded,
}

// OffloadCauses and RecallCauses are what services are usually moved for into the
// kernel and out of it; see [Change.Move].
var (
	OffloadCauses = []Cause{CauseQualified, CausePinned}
	RecallCauses  = []Cause{CauseFlapping, CauseRulesFailed, CausePinned, CauseInexpressible}
)

// The reasons that don't depend on anything. They hold no countdown: QualifiesAt
// says when, and a plan that only grew older must equal itself.
const (
	reasonQualified  = "qualified"
	reasonUpdating   = "kernel rules are being updated"
	reasonWriting    = "kernel rules are being written"
	reasonKernelOnly = "SCTP is served by the kernel only"
)

// carryText says what a service waits for that has carried too little.
func carryText(p *Policy) string {
	if n := p.OffloadMinConnections; n > 1 {
		return "waiting for its first " + strconv.FormatUint(n, 10) + " connections"
	}
	return "waiting for its first connection"
}

// refusal says why s serves no client; empty if it serves some.
func refusal(s *Service) (Cause, string) {
	if len(s.Frontends) == 0 {
		why := "it has no address"
		eachBinding(s.Port, func(Kind, Binding) { why = "all its addresses belong to other services" })
		return CauseNoAddress, why
	}
	dropped := false
	for i := range s.Frontends {
		if s.Serves(&s.Frontends[i]) {
			return "", ""
		}
		dropped = dropped || s.Frontends[i].Verdict == Drop
	}
	n, ready, weights := 0, 0, 0
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if e.Excluded {
			continue
		}
		n++
		if e.Ready || e.Serving && e.Terminating {
			ready++
			weights += int(e.Weight)
		}
	}
	switch {
	case n == 0 && len(s.Endpoints) > 0:
		return CauseNoEndpoint, "it has no endpoints that aren't another proxy's"
	case n == 0:
		return CauseNoEndpoint, "it has no endpoints"
	case ready == 0 && n == 1:
		return CauseNotReady, "its only endpoint isn't ready"
	case ready == 0:
		return CauseNotReady, fmt.Sprintf("none of its %d endpoints is ready", n)
	case weights == 0:
		return CauseNoWeight, "all its endpoints have weight 0"
	case dropped:
		return CauseNotLocal, "its traffic policy is Local and no endpoint on this node takes connections"
	}
	return CauseNoFamily, "it has no endpoint of its addresses' family"
}

// flapText says why a service was recalled, and how long it has to wait.
func flapText(endpoints, changes int, wait time.Duration) string {
	who := "1 endpoint"
	if endpoints != 1 {
		who = strconv.Itoa(endpoints) + " endpoints"
	}
	return fmt.Sprintf("%s changed health %d times in a minute; again after %s", who, changes, durationText(wait))
}

func failureText(reason string) string {
	return "kernel rules could not be written: " + reason
}

// durationText is d without the zero parts that time.Duration prints: "10m",
// not "10m0s".
func durationText(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func algorithmText(a service.Algorithm) string {
	return strings.ReplaceAll(string(a), "-", " ")
}
