package netfilter

// Walk is what a packet meets in one hook, and what comes of it.
type Walk struct {
	Steps []Step
	// Outcomes are all the ways that the packet may leave the hook. There is
	// always one at least. The probabilities of those that are certain add up to 1
	// if all are.
	Outcomes []Outcome
}

// Step is a rule or policy that the packet meets, whether it matches or not, in
// the order in which the kernel looks at them.
type Step struct {
	Hook Hook
	// Source says whose it is: "iptables-nft", "iptables-legacy" or "nftables".
	Source string
	Table  string // of nftables, with its family: "inet filter"
	Chain  string
	Index  int // of the rule in its chain, from 1; 0 for the policy
	Depth  int // of jumps: 0 in the base chain
	// Text is the rule as iptables-save or nft print it, without counters.
	Text           string
	Packets, Bytes *uint64 // nil: it has no counter

	Matched     Answer
	Probability float64 // that it matches, if it is Chance
	Policy      bool    // the base chain's policy, at its end
	// Outcome is what it does where it matches: "jump to KPROXY-PORTAL", "drop".
	Outcome string
	// Why is what decided: the first part that doesn't match, the entry of a set
	// that does, what can't be known.
	Why string
}

// Verdict is how a packet leaves a hook.
type Verdict string

// The verdicts. Accept is to go on, rewritten or not; Unknown is a target that
// decides by itself (NFQUEUE), or that this package doesn't know.
const (
	Accept  Verdict = "accept"
	Drop    Verdict = "drop"
	Reject  Verdict = "reject"
	Unknown Verdict = "unknown"
)

// Outcome is one way that a packet may leave a hook.
type Outcome struct {
	Verdict Verdict
	Packet  Packet // as it leaves: rewritten, marked
	// Probability is exact if the outcome is Certain. Else it is the most that it
	// may be, for rules were met of which it can't be said whether they match.
	Probability float64
	Certain     bool
	// Indexes of Steps, -1 for none: By decided the verdict (also that of an
	// accepting rule or a policy that isn't accept), Rewrote is the rule that gave
	// the packet another destination, Masked that gave it another source.
	By, Rewrote, Masked int
	// Doubts are the steps that make it uncertain.
	Doubts []int
}
