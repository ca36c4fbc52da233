package kernel

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Conntrack holds what users set of the kernel's connection tracking. What is 0 or
// false stays as it is.
type Conntrack struct {
	MaxPerCore                                   int // entries, times the number of CPUs
	Min                                          int // of entries, where MaxPerCore isn't 0
	TCPEstablished, TCPCloseWait, UDP, UDPStream time.Duration
	TCPBeLiberal                                 bool
}

// maxConntrack is the most entries that a number of CPUs leads to, as in
// kube-proxy: machines of many CPUs would spend gigabytes on a table that they
// don't need.
const maxConntrack = 1 << 20

// Max is the number of entries to allow on a machine of this many CPUs; 0 leaves
// the kernel's. Min isn't capped: a configuration that asks for more gets it.
func (c Conntrack) Max(cpus int) int {
	if c.MaxPerCore <= 0 {
		return 0
	}
	n := c.MaxPerCore * max(cpus, 1)
	if n > maxConntrack {
		return maxConntrack
	}
	return max(n, c.Min)
}

// Sysctls lists the settings (Documentation/networking/nf_conntrack-sysctl.rst).
func (c Conntrack) Sysctls(cpus int) []Sysctl {
	const prefix = "net.netfilter.nf_conntrack_"
	var out []Sysctl
	if n := c.Max(cpus); n > 0 {
		out = append(out, Sysctl{Name: prefix + "max", Value: strconv.Itoa(n), AtLeast: true,
			Reason: fmt.Sprintf("connections that are tracked, for %d CPUs; the host's own network namespace sets it for all", cpus)})
	}
	for _, t := range []struct {
		name, reason string
		d            time.Duration
	}{
		{"tcp_timeout_established", "after which an idle TCP connection is forgotten", c.TCPEstablished},
		{"tcp_timeout_close_wait", "after which a TCP connection is forgotten that one end has closed", c.TCPCloseWait},
		{"udp_timeout", "after which a UDP flow is forgotten that wasn't answered", c.UDP},
		{"udp_timeout_stream", "after which an idle UDP flow is forgotten", c.UDPStream},
	} {
		if t.d > 0 {
			out = append(out, Sysctl{Name: prefix + t.name, Value: strconv.Itoa(int(t.d / time.Second)), Reason: "seconds, as configured, " + t.reason})
		}
	}
	if c.TCPBeLiberal {
		out = append(out, Sysctl{Name: prefix + "tcp_be_liberal", Value: "1", Reason: "as configured: packets outside of the TCP window aren't taken for invalid"})
	}
	return out
}

// ConntrackBuckets is where the size of conntrack's hash table is.
const ConntrackBuckets = "/sys/module/nf_conntrack/parameters/hashsize"

// Buckets makes the hash table in the file path (ConntrackBuckets) big enough for max
// entries, four to a bucket, which is what the kernel's own default comes to. The kernel
// rounds up to what fills whole pages, and refuses outside of the host's own network namespace
// (nf_conntrack_set_hashsize: EOPNOTSUPP).
func Buckets(path string, max int) Sysctl {
	return Sysctl{Name: path, Value: strconv.Itoa(max / 4), Raise: true, Reason: fmt.Sprintf("%d connections are found quickly", max)}
}

// EnsureConntrack carries out c in the network namespace of the calling thread
// and reports what wasn't so. A hash table that this process may not change is reported, and
// is slow, but works.
func EnsureConntrack(c Conntrack, cpus int) ([]SysctlReport, error) {
	settings := c.Sysctls(cpus)
	if max := c.Max(cpus); max > 0 {
		settings = append(settings, Buckets(ConntrackBuckets, max))
	}
	return EnsureSysctls(settings)
}

// LiberalConntrack reports whether packets outside of the TCP window count as
// valid, in the network namespace of the calling thread.
func LiberalConntrack() bool {
	n, _ := ReadSysctl("net", "netfilter", "nf_conntrack_tcp_be_liberal")
	return n != 0
}

// OnlineCPUs reads the number of CPUs from the list in the file path, normally
// /sys/devices/system/cpu/online ("0-3,8"). The kernel's, not this process's: a
// container that may use one CPU proxies for the whole machine.
func OnlineCPUs(path string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("count CPUs: %w", err)
	}
	n := 0
	for part := range strings.SplitSeq(strings.TrimSpace(string(b)), ",") {
		first, last, isRange := strings.Cut(part, "-")
		from, err := strconv.Atoi(first)
		to := from
		if err == nil && isRange {
			to, err = strconv.Atoi(last)
		}
		if err != nil || to < from {
			return 0, fmt.Errorf("count CPUs: %q in %s is no list of CPUs", strings.TrimSpace(string(b)), path)
		}
		n += to - from + 1
	}
	return n, nil
}

// KeepAccounting calls probe and sets conntrack's accounting back, which the kernel turns on when it checks a rule that counts
// a connection's packets (connbytes_mt_check in net/netfilter/xt_connbytes.c, nft_ct_get_init in net/netfilter/nft_ct.c).
func KeepAccounting(probe func()) {
	const file = "/proc/sys/net/netfilter/nf_conntrack_acct"
	was, err := os.ReadFile(file)
	probe()
	if is, err2 := os.ReadFile(file); err == nil && err2 == nil && string(is) != string(was) {
		_ = os.WriteFile(file, was, 0o644) // where it can't be written, nobody minds that it is on
	}
}
