package iptables

import (
	"fmt"
	"net/netip"
	"strings"

	"kproxy.dev/kproxy/service"
)

// comment prints a comment match as iptables-save does (xtables_save_string):
// quoted unless it is one plain word.
func comment(text string) string {
	plain := strings.IndexFunc(text, func(r rune) bool {
		return r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	}) < 0
	if !plain || text == "" {
		text = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `'`, `\'`).Replace(text) + `"`
	}
	return "-m comment --comment " + text
}

// setMark sets bits of the packet's mark and leaves the others.
func setMark(value, mask uint32) string {
	return fmt.Sprintf("-j MARK --set-xmark %#x/%#x", value, mask)
}

func hasMark(value, mask uint32) string {
	return fmt.Sprintf("-m mark --mark %#x/%#x", value, mask)
}

func inSet(set, directions string) string { return "-m set --match-set " + set + " " + directions }

func notInSet(set, directions string) string {
	return "-m set ! --match-set " + set + " " + directions
}

// loopback is the network that never leaves a host.
var loopback = [2]string{service.IPv4: "127.0.0.0/8", service.IPv6: "::1/128"}

var rejectWith = [2]string{service.IPv4: "icmp-port-unreachable", service.IPv6: "icmp6-port-unreachable"}

// host prints an address as a destination of one address.
func host(a netip.Addr) string {
	return netip.PrefixFrom(a, a.BitLen()).String()
}

// toPort matches one port, with the address before it unless that is the zero Addr.
func toPort(a netip.Addr, p service.Protocol, port uint16, text string) string {
	var b strings.Builder
	if a.IsValid() {
		b.WriteString("-d " + host(a) + " ")
	}
	fmt.Fprintf(&b, "-p %s %s -m %s --dport %d", p, comment(text), p, port)
	return b.String()
}
