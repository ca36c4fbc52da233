package steering

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Host holds what Probe found out.
type Host struct {
	Caps        plan.Caps
	Rules       plan.Capability // every rule of iptables that carries services works
	Variant     kernel.Variant  // of iptables, the one that holds the host's rules
	RandomFully bool            // MASQUERADE --random-fully works
	SocketMatch bool            // -m socket works
	Netmap      bool            // NETMAP works
	// CatchRefusals: -m connbytes works
	CatchRefusals bool
	LogRefusals   bool // NFLOG and -m limit work
	IPv6          bool // ip6tables works

	missing []error
}

// Missing returns what kproxy can't do without in any mode, or nil. Every part
// is a [*kernel.Missing]. It is [kernel.ErrPermission] where the host has iptables, and this process may
// not use it.
func (h *Host) Missing() error { return errors.Join(h.missing...) }

// Prober finds out what this host can do, by trying it in a scratch chain and a
// scratch set of kproxy's own, which it removes again. It works in the network
// namespace of the calling thread.
type Prober struct {
	Runner kernel.Runner
	// OpenSets opens the set store.
	OpenSets func() (kernel.SetStore, error)
	// Capabilities is the effective capability set; nil reads the process's.
	Capabilities func() (uint64, error)
	// Find finds the variant of iptables; nil for [Prober.FindVariant].
	Find func(context.Context) (kernel.Variant, plan.Capability)
}

// NewProber returns a Prober of this host.
func NewProber(sets kernel.SetStore) *Prober {
	return &Prober{Runner: kernel.Exec{}, OpenSets: func() (kernel.SetStore, error) { return sets, nil }}
}

// Names of the scratch objects.
const (
	probeChain = kernel.Prefix + "PROBE"
	probeSet   = kernel.Prefix + "PROBE"
)

// Probe tries everything. The error is only about ctx: what the host lacks is a
// result.
func (p *Prober) Probe(ctx context.Context) (*Host, error) {
	h := &Host{Rules: plan.Capability{Name: "iptables"}}
	find := p.Find
	if find == nil {
		find = p.FindVariant
	}
	variant, programs := find(ctx)
	h.Variant = variant
	const how = "run kproxy as root, or give it CAP_NET_ADMIN and CAP_NET_RAW"
	h.need(p.probeCapability("CAP_NET_ADMIN", unix.CAP_NET_ADMIN), how, kernel.ErrPermission)
	// iptables asks the kernel for its sets (-m set), and its legacy variant for
	// everything, through a raw socket.
	var denied error
	if programs.Supported {
		denied = kernel.ErrPermission
	}
	h.need(p.probeCapability("CAP_NET_RAW", unix.CAP_NET_RAW), how, denied)
	sets, c := p.probeSets()
	h.need(c, "kernel options CONFIG_IP_SET, CONFIG_IP_SET_HASH_IPPORT, _HASH_IPPORTIP, _HASH_IPPORTNET, _HASH_NET, _HASH_IP, _BITMAP_PORT", nil)
	h.need(programs, "install the Debian package iptables", nil)
	if programs.Supported && sets != nil {
		kernel.KeepAccounting(func() { p.probeRules(ctx, h, sets) })
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if h.Rules.Reason == "" {
		h.Rules.Supported, h.Rules.Reason = true, "every rule works, variant "+h.Variant.Name
	}
	return h, nil
}

// need records a capability, and that it is missing where everything depends on it; kind is
// what that is an error of, nil for none.
func (h *Host) need(c plan.Capability, how string, kind error) {
	if !c.Supported {
		h.missing = append(h.missing, &kernel.Missing{What: c.Name, How: how, Err: &reason{c.Reason, kind}})
		c.Reason += ": " + how
		h.withoutRules(c)
	}
	h.Caps.All = append(h.Caps.All, c)
}

// withoutRules says that the data plane iptables lacks a capability; the first one counts.
func (h *Host) withoutRules(c plan.Capability) {
	if h.Rules.Reason == "" {
		h.Rules.Reason = c.Name + ": " + c.Reason
	}
}

// reason is a capability's, as an error of a kind.
type reason struct {
	text string
	kind error
}

func (r *reason) Error() string { return r.text }
func (r *reason) Unwrap() error { return r.kind }

func (p *Prober) probeCapability(name string, bit int) plan.Capability {
	c := plan.Capability{Name: name}
	caps := p.Capabilities
	if caps == nil {
		caps = kernel.Capabilities
	}
	have, err := caps()
	switch {
	case err != nil:
		c.Reason = err.Error()
	case have&(1<<bit) == 0:
		c.Reason = "this process doesn't have it"
	default:
		c.Supported, c.Reason = true, fmt.Sprintf("user %d has it", os.Geteuid())
	}
	return c
}

// probeSets creates one set of each type that kproxy uses.
func (p *Prober) probeSets() (kernel.SetStore, plan.Capability) {
	c := plan.Capability{Name: "ipset"}
	sets, err := p.OpenSets()
	if err != nil {
		c.Reason = err.Error()
		return nil, c
	}
	for _, t := range []kernel.SetType{kernel.HashIP, kernel.HashIPPort, kernel.HashIPPortIP, kernel.HashIPPortNet, kernel.HashNet, kernel.BitmapPort} {
		s := kernel.Set{Name: probeSet, Type: t, Timeout: 1}
		if err := sets.Create(s); err != nil {
			c.Reason = fmt.Sprintf("create a %s set: %v", t, err)
			return nil, c
		}
		if err := sets.Destroy(s.Name); err != nil {
			c.Reason = fmt.Sprintf("destroy a %s set: %v", t, err)
			return nil, c
		}
	}
	c.Supported, c.Reason = true, "every set type works"
	return sets, c
}

// FindVariant returns the variant of iptables that holds the host's rules, as
// Kubernetes' iptables-wrappers find it: where the kubelet left its hints, else
// where kproxy's own chains are, else where more rules are, else what the host
// calls iptables.
func (p *Prober) FindVariant(ctx context.Context) (kernel.Variant, plan.Capability) {
	c := plan.Capability{Name: "iptables"}
	out, err := p.Runner.Run(ctx, nil, "iptables", "--version")
	version := strings.TrimSpace(string(out))
	if err != nil {
		c.Reason = err.Error()
	}
	usual := kernel.DefaultVariant()
	usual.Name = variantName(version)
	candidates := []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy(), usual}
	if usual.Name == "legacy" {
		candidates = []kernel.Variant{kernel.VariantLegacy(), kernel.VariantNFT(), usual}
	}
	best, score := usual, -1
	for i, v := range candidates {
		if i == 2 && score >= 0 {
			break // the same rules under the usual name
		}
		s, err := p.score(ctx, v)
		if err != nil && !errors.Is(err, kernel.ErrNoProgram) {
			c.Reason = err.Error()
		}
		if err == nil && s > score {
			best, score = v, s
		}
	}
	if score < 0 {
		return best, c
	}
	c.Supported, c.Reason = true, fmt.Sprintf("variant %s; %s", best.Name, version)
	return best, c
}

// variantName tells the variant by what `iptables --version` prints.
func variantName(version string) string {
	switch {
	case strings.Contains(version, "nf_tables"):
		return "nft"
	case version != "":
		return "legacy"
	}
	return ""
}

// Weights of what is found in a variant's rules; see [Prober.FindVariant].
const (
	hintScore = 1 << 40
	ownScore  = 1 << 30
)

func (p *Prober) score(ctx context.Context, v kernel.Variant) (int, error) {
	total := 0
	for _, f := range service.Families {
		text, err := p.Runner.Run(ctx, nil, v.Program[f]+"-save")
		if err != nil {
			if f == service.IPv6 {
				continue
			}
			return 0, err
		}
		s := string(text)
		if strings.Contains(s, ":KUBE-IPTABLES-HINT ") || strings.Contains(s, ":KUBE-KUBELET-CANARY ") {
			total += hintScore
		}
		if strings.Contains(s, ":"+kernel.Prefix+"SERVICES ") {
			total += ownScore
		}
		total += strings.Count(s, "\n-A ")
	}
	return total, nil
}
