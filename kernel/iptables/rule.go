package iptables

import (
	"net/netip"
	"strconv"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// toPort matches one port, with the address before it unless that is the zero Addr.
func toPort(a netip.Addr, p service.Protocol, port uint16, text string) string {
	to := ""
	if a.IsValid() {
		to = "-d " + kernel.HostPrefix(a) + " "
	}
	proto := p.String()
	return to + "-p " + proto + " -m " + proto + " --dport " + strconv.Itoa(int(port)) + " " + kernel.Comment(text)
}
