package plan

// Cause is a Reason without its particulars: one of a few words that metrics and
// alerts can go by, where the Reason is a sentence for people.
type Cause string

// The causes of a service's standing, by data plane.
const (
	// In a kernel data plane.
	CauseQualified  Cause = "qualified"
	CauseKernelOnly Cause = "kernel-only" // only the kernel can serve its protocol

	// In either, because a user said so.
	CausePinned Cause = "pinned"

	// In userspace for a moment.
	CauseUpdating Cause = "rules-updating" // the kernel's rules follow a change
	CauseWriting  Cause = "rules-writing"  // it qualifies, its rules aren't written yet
	CauseFew      Cause = "few-connections"
	CauseUnsteady Cause = "not-steady" // it changed less than Policy.OffloadAfter ago

	// In userspace because something isn't right.
	CauseRulesFailed Cause = "rules-failed" // the kernel refused its rules
	CauseFlapping    Cause = "endpoints-flapping"
	CauseRefused     Cause = "connection-refused" // an endpoint refused one in the kernel
	CausePanic       Cause = "endpoints-down"     // so many that those are served too

	// In userspace for good.
	CauseNoKernel      Cause = "no-kernel-data-plane" // of the mode, or on this host
	CauseInexpressible Cause = "kernel-cannot"        // the kernel can't do what it asks for

	// Served by nobody.
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
	CauseRulesFailed, CauseFlapping, CauseRefused, CausePanic,
	CauseNoKernel, CauseInexpressible,
	CauseNoAddress, CauseNoEndpoint, CauseNotReady, CauseNoWeight, CauseNotLocal, CauseNoFamily, CauseUnservable, CauseExcluded,
}

// OffloadCauses and RecallCauses are what services are usually moved for into the
// kernel and out of it; see [Change.Move].
var (
	OffloadCauses = []Cause{CauseQualified, CausePinned}
	RecallCauses  = []Cause{CauseFlapping, CauseRefused, CauseRulesFailed, CausePinned, CauseInexpressible}
)
