package iptables

import (
	"fmt"
	"net/netip"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// toPort matches one port, with the address before it unless that is the zero Addr.
func toPort(a netip.Addr, p service.Protocol, port uint16, text string) string {
	var b strings.Builder
	if a.IsValid() {
		b.WriteString("-d " + kernel.HostPrefix(a) + " ")
	}
	fmt.Fprintf(&b, "-p %s %s -m %s --dport %d", p, kernel.Comment(text), p, port)
	return b.String()
}
