package main

import (
	"fmt"
	"slices"
)

// kind is whose program a subject is.
type kind int

const (
	nobody kind = iota // a node without a proxy
	kproxy
	kubeProxy
)

// subject is a proxy in one of its modes.
type subject struct {
	name    string
	kind    kind
	mode    string // as its --mode or --proxy-mode names it
	variant string // of iptables: "nft" or "legacy"
	config  string // how it was configured, for the report
	most    int    // services, unless -slow; 0 for any number
}

// tracking is the mode of nobody on a node that tracks connections.
const tracking = "conntrack"

// everyService has every service carried by the kernel at once and for good: the
// state that a change or a start costs most in. With the defaults, a service
// that nobody uses costs the kernel's data plane nothing but its rules.
var everyService = []string{"--offload-after", "0s", "--offload-min-connections", "0"}

const (
	kproxyConfig    = "defaults, but --offload-after 0s --offload-min-connections 0: the kernel carries every service; -v debug, to see when its rules are written"
	userspaceConfig = "defaults"
	kubeConfig      = "defaults, minSyncPeriod 1s; --vmodule=proxier=2, to see when it has synced"
)

var subjects = []subject{
	{name: "no-proxy", kind: nobody, config: "the node routes"},
	{name: "no-proxy-conntrack", kind: nobody, mode: tracking, config: "the node routes and has one rule of nat, for which the kernel tracks connections, as it does for any that masquerades pods"},
	{name: "kproxy-nft", kind: kproxy, mode: "iptables", variant: "nft", config: kproxyConfig},
	{name: "kube-proxy-iptables-nft", kind: kubeProxy, mode: "iptables", variant: "nft", config: kubeConfig, most: 2000},
	{name: "kube-proxy-nftables", kind: kubeProxy, mode: "nftables", variant: "nft", config: kubeConfig},
	{name: "kproxy-legacy", kind: kproxy, mode: "iptables", variant: "legacy", config: kproxyConfig},
	{name: "kube-proxy-iptables-legacy", kind: kubeProxy, mode: "iptables", variant: "legacy", config: kubeConfig},
	{name: "kproxy-userspace", kind: kproxy, mode: "userspace", variant: "nft", config: userspaceConfig},
}

func subjectNames() []string {
	var out []string
	for _, s := range subjects {
		out = append(out, s.name)
	}
	return out
}

func subjectOf(name string) (subject, bool) {
	i := slices.IndexFunc(subjects, func(s subject) bool { return s.name == name })
	if i < 0 {
		return subject{}, false
	}
	return subjects[i], true
}

// written is a part of the line that the proxy logs when its rules are in the
// kernel.
func (s subject) written() string {
	if s.kind == kproxy {
		return "programmed the kernel"
	}
	return "SyncProxyRules complete"
}

// left says why it isn't measured with so many services; empty if it is.
func (s subject) left(services int) string {
	if s.most == 0 || services <= s.most {
		return ""
	}
	return fmt.Sprintf("with %d services its first sync takes many minutes; -slow measures it", services)
}

// kernel reports whether the proxy has rules of services.
func (s subject) kernel() bool { return s.mode != "userspace" && s.kind != nobody }
