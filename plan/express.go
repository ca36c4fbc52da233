package plan

import "kproxy.dev/kproxy/service"

// Inexpressible says why the data plane d can't carry service port p exactly
// as specified; empty if it can.
func Inexpressible(d DataPlane, p *service.Port) string {
	switch d {
	case None:
		return "nothing is carried"
	case Userspace:
		if p.Protocol == service.SCTP {
			return "SCTP can't be served in userspace"
		}
		return ""
	}
	if p.ProxyProtocol != 0 {
		return string(d) + " can't send PROXY protocol headers"
	}
	if !scheduler(d, p.Algorithm) {
		return string(d) + " can't do " + algorithmText(p.Algorithm)
	}
	return ""
}

// scheduler reports whether the kernel data plane d has the algorithm a.
// iptables has `statistic --mode nth` and `--mode random` and nothing that
// knows of connections or hashes; IPVS has rr, wrr, lc, sh and mh, and no
// random scheduler (net/netfilter/ipvs/Kconfig).
func scheduler(d DataPlane, a service.Algorithm) bool {
	switch a {
	case service.RoundRobin, service.WeightedRoundRobin:
		return true
	case service.Random:
		return d == IPTables
	case service.LeastConnections, service.SourceHash, service.Maglev:
		return d == IPVS
	}
	return false
}

// degraded says how the rules of kernel data plane d fall short of p's
// specification; empty if they don't. Renderers choose at random, by weight,
// for an algorithm that they can't express.
func degraded(d DataPlane, p *service.Port) string {
	if d == None || Inexpressible(d, p) == "" {
		return ""
	}
	when := " while kproxy is down"
	if p.Protocol == service.SCTP {
		when = "" // the kernel's rules are all it has
	}
	var out string
	if !scheduler(d, p.Algorithm) {
		out = algorithmText(p.Algorithm) + " falls back to random choice" + when
	}
	if p.ProxyProtocol != 0 {
		if out != "" {
			out += "; "
		}
		out += "endpoints get no PROXY protocol header" + when
	}
	return out
}

// kernelChoice is the kernel data plane of a mode on this host.
type kernelChoice struct {
	plane DataPlane
	why   string // there is none; empty if there is one
}

// chooseKernel returns the kernel data plane that mode m leads to. Mode auto
// takes the best one that the host supports.
func chooseKernel(m Mode, caps Caps) kernelChoice {
	switch {
	case m == ModeIPVS && caps.IPVS.Supported, m == ModeAuto && caps.IPVS.Supported:
		return kernelChoice{plane: IPVS}
	case m == ModeIPTables && caps.IPTables.Supported, m == ModeAuto && caps.IPTables.Supported:
		return kernelChoice{plane: IPTables}
	case m == ModeIPVS:
		return kernelChoice{None, lacks("IPVS", caps.IPVS)}
	case m == ModeIPTables || m == ModeAuto:
		return kernelChoice{None, lacks("iptables", caps.IPTables)}
	}
	return kernelChoice{None, "mode userspace offloads nothing"}
}

func lacks(what string, c Capability) string {
	if c.Reason == "" {
		return "this host can't do " + what
	}
	return "this host can't do " + what + ": " + c.Reason
}
