package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// forwardingSysctls decide whether the host passes on packets of others. For
// IPv6 it is the one for all interfaces, which ip6_forward looks at first.
var forwardingSysctls = [2]struct{ family, name string }{
	service.IPv4: {"IPv4", "net.ipv4.ip_forward"},
	service.IPv6: {"IPv6", "net.ipv6.conf.all.forwarding"},
}

// Forwarding finds out whether the network namespace of the calling thread
// forwards, per family. A family that the kernel doesn't have counts as
// supported: nobody can reach a service in it in any data plane, so it is no
// reason to keep one from the kernel. So does a setting that can't be read, of
// which the reason tells.
func Forwarding() [2]plan.Capability { return forwardingUnder("/proc/sys") }

func forwardingUnder(root string) (out [2]plan.Capability) {
	for i, s := range forwardingSysctls {
		c := plan.Capability{Name: s.family + " forwarding", Supported: true, Reason: "sysctl " + s.name}
		b, err := os.ReadFile(filepath.Join(root, strings.ReplaceAll(s.name, ".", "/")))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			c.Reason = "no " + s.family
		case err != nil:
			c.Reason = fmt.Sprintf("read sysctl %s: %v", s.name, err)
		default:
			c.Supported = strings.TrimSpace(string(b)) != "0"
		}
		out[i] = c
	}
	return out
}
