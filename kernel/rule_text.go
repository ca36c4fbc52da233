package kernel

import (
	"fmt"
	"net/netip"
	"strings"

	"kproxy.dev/kproxy/service"
)

// Comment prints a comment match as iptables-save does (xtables_save_string):
// quoted unless it is one plain word.
func Comment(text string) string {
	plain := strings.IndexFunc(text, func(r rune) bool {
		return r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	}) < 0
	if !plain || text == "" {
		text = `"` + quoted.Replace(text) + `"`
	}
	return "-m comment --comment " + text
}

var quoted = strings.NewReplacer(`\`, `\\`, `"`, `\"`, `'`, `\'`)

// SetMark sets bits of the packet's mark and leaves the others.
func SetMark(value, mask uint32) string {
	return fmt.Sprintf("-j MARK --set-xmark %#x/%#x", value, mask)
}

// HasMark matches bits of the packet's mark.
func HasMark(value, mask uint32) string {
	return fmt.Sprintf("-m mark --mark %#x/%#x", value, mask)
}

// InSet matches packets that are in a set; directions are "src" and "dst", one
// for each part of an entry, separated by commas.
func InSet(set, directions string) string { return "-m set --match-set " + set + " " + directions }

// NotInSet matches those that aren't.
func NotInSet(set, directions string) string {
	return "-m set ! --match-set " + set + " " + directions
}

// Loopback is the network that never leaves a host.
var Loopback = [2]string{service.IPv4: "127.0.0.0/8", service.IPv6: "::1/128"}

// RejectWith is what REJECT answers with unless TCP's reset is asked for.
var RejectWith = [2]string{service.IPv4: "icmp-port-unreachable", service.IPv6: "icmp6-port-unreachable"}

// HostPrefix prints an address as a destination of one address.
func HostPrefix(a netip.Addr) string {
	return netip.PrefixFrom(a, a.BitLen()).String()
}
