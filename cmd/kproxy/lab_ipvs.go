package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// virtualServers reads the kernel's table of virtual servers in a namespace,
// which is empty where the kernel has none.
func virtualServers(n *lab.Namespace) (servers []ipvs.Server, err error) {
	err = n.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			servers, err = ipvs.ParseProc(text)
		}
		return err
	})
	return servers, err
}

// virtualServerText prints a virtual server as `ipvsadm -Ln` does, with all
// connections of a real server in one number.
func virtualServerText(s *ipvs.Server) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %s %s\n", s.Protocol, s.Address, s.Scheduler)
	for i, r := range s.Reals {
		fmt.Fprintf(&b, "  -> %s  Masq  weight %d, %d connections\n", r.Address, r.Weight, s.Connections[i])
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// checkVirtualServer shows the service's virtual server where it has one, and
// observes how many of its real servers take new connections.
func (d *demo) checkVirtualServer(what string, takers int) error {
	if d.kernel != plan.IPVS {
		return nil
	}
	servers, err := virtualServers(d.net.Node)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(servers, func(s ipvs.Server) bool { return s.Protocol == service.TCP && s.Address == labService })
	if i < 0 {
		d.observe(false, "IPVS has a virtual server for %s", labService)
		return nil
	}
	n := 0
	for _, r := range servers[i].Reals {
		if r.Weight > 0 {
			n++
		}
	}
	d.observe(n == takers, "%s:", what)
	d.show(virtualServerText(&servers[i]))
	return nil
}
