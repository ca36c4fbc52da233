package trace

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
)

// sysctl reads a setting of the network namespace of the calling thread; parts
// are not to be joined with dots, which names of interfaces may contain.
func sysctl(parts ...string) (int, bool) {
	b, err := os.ReadFile("/proc/sys/" + strings.Join(parts, "/"))
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	return n, err == nil
}

// settingName is how sysctl(8) spells a setting; a dot in a name is a slash
// there.
func settingName(parts ...string) string {
	out := make([]string, len(parts))
	for i, p := range parts {
		out[i] = strings.ReplaceAll(p, ".", "/")
	}
	return strings.Join(out, ".")
}

// forwardingOff returns the setting that keeps packets which came in on an
// interface from being forwarded; empty if none does. IPv4 goes by the
// interface's own setting (IN_DEV_FORWARD in net/ipv4/route.c), IPv6 by that for
// all (ip6_forward in net/ipv6/ip6_output.c), since Linux 6.17 also by
// force_forwarding of the interface.
func forwardingOff(f service.Family, in string) string {
	if f == service.IPv6 {
		if n, ok := sysctl("net", "ipv6", "conf", "all", "forwarding"); ok && n == 0 {
			if n, ok := sysctl("net", "ipv6", "conf", in, "force_forwarding"); !ok || n == 0 {
				return "net.ipv6.conf.all.forwarding"
			}
		}
		return ""
	}
	if n, ok := sysctl("net", "ipv4", "ip_forward"); ok && n == 0 {
		if n, ok := sysctl("net", "ipv4", "conf", in, "forwarding"); !ok || n == 0 {
			return "net.ipv4.ip_forward"
		}
	}
	if n, ok := sysctl("net", "ipv4", "conf", in, "forwarding"); ok && n == 0 {
		return settingName("net", "ipv4", "conf", in, "forwarding")
	}
	return ""
}

// reversePath is what the reverse path filter says to a source address
// (fib_validate_source in net/ipv4/fib_frontend.c). IPv6 has none but as a rule
// of iptables.
type reversePath struct {
	mode    int    // 0 off, 1 strict, 2 loose: the greater of all's and the interface's
	setting string // that decides
	marked  string // the setting that has the look-up go by the packet's mark; empty if none does
	back    route  // to the source
	refused bool
}

// checkReversePath looks whether a source address may come in on an interface.
func checkReversePath(from netip.Addr, in string, mark uint32) reversePath {
	if service.FamilyOf(from) == service.IPv6 {
		return reversePath{}
	}
	var r reversePath
	for _, conf := range []string{in, "all"} {
		if n, ok := sysctl("net", "ipv4", "conf", conf, "rp_filter"); ok && n > r.mode {
			r.mode, r.setting = n, settingName("net", "ipv4", "conf", conf, "rp_filter")
		}
	}
	for _, conf := range []string{in, "all"} {
		if n, _ := sysctl("net", "ipv4", "conf", conf, "src_valid_mark"); n != 0 && mark != 0 {
			r.marked = settingName("net", "ipv4", "conf", conf, "src_valid_mark")
		}
	}
	if r.marked == "" {
		mark = 0
	}
	if r.mode == 0 && mark == 0 {
		return r
	}
	r.back = askRoute(query{to: from, mark: mark})
	if r.mode == 0 { // rules of routing make the kernel look all the same, and an address of its own is no source
		r.refused = r.back.err == nil && r.back.kind != unix.RTN_UNICAST
		return r
	}
	r.refused = r.back.err != nil || r.back.kind != unix.RTN_UNICAST || r.mode == 1 && r.back.link != in
	return r
}

// remedy is for packets that it refuses.
func (r *reversePath) remedy() string {
	if r.marked != "" {
		return fmt.Sprintf("look the source up without the mark: sysctl -w %s=0", r.marked)
	}
	return fmt.Sprintf("mend the route back, or make the filter loose: sysctl -w %s=2", r.setting)
}

func (r *reversePath) String() string {
	if r.marked != "" {
		return r.marked + " = 1"
	}
	name := map[int]string{0: "off", 1: "strict", 2: "loose"}[r.mode]
	return fmt.Sprintf("%s = %d (%s)", r.setting, r.mode, name)
}

// martian says why an address can't be the source of a packet from another host
// (ip_route_input_slow in net/ipv4/route.c); empty if it can.
func martian(from netip.Addr) string {
	switch {
	case from.IsLoopback():
		return "loopback addresses mean nothing to other hosts"
	case from.IsMulticast():
		return "a multicast address is nobody's"
	case from == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "the broadcast address is nobody's"
	case from.IsUnspecified():
		return "it is no address"
	}
	return ""
}
