package subject

import (
	"context"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/test/bench/traffic"
)

// Subject is a program or a way for packets from client to backend.
type Subject struct {
	Name  string
	About string
	tcp   bool
	udp   bool
	way   way
	start func(context.Context, *Rig) error // nil for nothing to start
}

// way says which address the client connects to.
type way int

const (
	toBackend way = iota
	toNode
	toService
)

// ServiceAddress is where clients reach a service.
var ServiceAddress = netip.MustParseAddr("10.96.0.10")

// Names of subjects that targets name.
const (
	Direct          = "direct"
	DNAT            = "dnat"
	HAProxy         = "haproxy"
	HAProxySplice   = "haproxy-splice"
	HAProxyRedirect = "haproxy-redirect"
	Nginx           = "nginx"
	NginxRedirect   = "nginx-redirect"
	Copy            = "io.Copy"
	Engine          = "engine"
	KProxy          = "kproxy"
	KProxyMasq      = "kproxy-masquerade"
)

// All are the subjects, in the order of the report.
var All = []Subject{
	{Direct, "no proxy: the node routes", true, true, toBackend, nil},
	{DNAT, "the kernel rewrites the destination (iptables DNAT)", true, true, toNode, startDNAT},
	{HAProxy, "HAProxy, at the node's address", true, false, toNode, haproxy("haproxy.cfg")},
	{HAProxySplice, "HAProxy with option splice-auto, at the node's address", true, false, toNode, haproxy("haproxy-splice.cfg")},
	{Nginx, "nginx stream, at the node's address", true, true, toNode, startNginx},
	{Copy, "a Go proxy of io.Copy, at the node's address", true, false, toNode, own("copy")},
	{Engine, "kproxy's userspace data plane alone, at the node's address", true, true, toNode, own("engine")},
	{HAProxyRedirect, "HAProxy, reached by a REDIRECT rule as kproxy is", true, false, toService, redirected(haproxy("haproxy.cfg"))},
	{NginxRedirect, "nginx stream, reached by a REDIRECT rule as kproxy is", false, true, toService, redirected(startNginx)},
	{KProxy, "kproxy at a service's address, the client's address kept", true, true, toService, kproxy(false)},
	{KProxyMasq, "kproxy at a service's address, masquerading as others do", true, true, toService, kproxy(true)},
}

// Find returns the subject with a name, or nil.
func Find(name string) *Subject {
	i := slices.IndexFunc(All, func(s Subject) bool { return s.Name == name })
	if i < 0 {
		return nil
	}
	return &All[i]
}

// Carries reports whether a subject can carry a kind of load.
func (s *Subject) Carries(k traffic.Kind) bool {
	if k.UDP() {
		return s.udp
	}
	return s.tcp
}

// Ports that subjects serve.
func ports(udp bool) []uint16 {
	var out []uint16
	for _, k := range traffic.Kinds {
		if k.UDP() == udp {
			out = append(out, k.Port())
		}
	}
	return out
}
