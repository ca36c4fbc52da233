package bugreport

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

const (
	// routesAtMost, flowsAtMost and elementsAtMost, of a set, bound what a node may have millions of.
	routesAtMost, flowsAtMost, elementsAtMost = 5000, 2000, 1000
	// journalLines are the last ones of a unit for systemd.
	journalLines = "500"
)

// niceness leaves this process less than 5% of a core that another one wants all of: its weight is 45, that one's 1024
// (sched_prio_to_weight in kernel/sched/core.c). At 19 it would get too little to be done in time where many do.
const niceness = 14

// BeNice has this process, and the programs that it runs, give way to others: each thread by itself, as setpriority(2) is
// about one.
func BeNice() {
	threads, _ := filepath.Glob("/proc/self/task/*")
	for _, t := range threads {
		var tid int
		if _, err := fmt.Sscan(filepath.Base(t), &tid); err == nil {
			_ = unix.Setpriority(unix.PRIO_PROCESS, tid, niceness) // lowering one's own is always allowed
		}
	}
}

// AddNode adds what the kernel and the host have, in the network namespace of this process, until ctx ends: what is left then
// is named as missing. It changes nothing and loads no module.
func (r *Report) AddNode(ctx context.Context) {
	r.add(ctx, "host.txt", "kernel, distribution, programs, modules", host)
	r.add(ctx, "sysctl.txt", "kernel settings that kproxy depends on, and their like", settings)
	r.add(ctx, "rules/ip-rule.txt", "routing rules", routingRules)
	r.add(ctx, "rules/ip-route.txt", fmt.Sprintf("routes of all tables, %d at most of each family", routesAtMost), routes)
	r.add(ctx, "interfaces.txt", "interfaces and their addresses", interfaces)
	for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy()} {
		for f, p := range v.Program {
			if v.Name == kernel.VariantLegacy().Name && len(kernel.LegacyTables(service.Family(f))) == 0 {
				continue // to ask would load modules
			}
			r.add(ctx, "rules/"+p+"-save.txt", "rules of "+p+", with counters", program(p+"-save", "-c"))
		}
	}
	r.add(ctx, "rules/nft.txt", fmt.Sprintf("all tables of nftables, with %d elements of a set at most", elementsAtMost), nftables)
	r.add(ctx, "rules/ipset.txt", "sets of ipset", program("ipset", "save"))
	r.add(ctx, "conntrack.txt", fmt.Sprintf("the first %d entries of connection tracking", flowsAtMost), flows)
	r.add(ctx, "net.txt", "the kernel's counters of packets, sockets and virtual servers", counters)
	r.add(ctx, "journal.txt", "the last lines that kproxy.service logged", program("journalctl", "--unit", "kproxy.service", "--lines", journalLines, "--no-pager", "--output", "short-iso"))
}

// Step returns a context for one of several steps: it ends after half of the time that ctx has left, so that none takes all of it.
func Step(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(end)/2)
}

func (r *Report) add(ctx context.Context, name, what string, f func(context.Context) ([]byte, error)) {
	step, cancel := Step(ctx)
	defer cancel()
	type result struct {
		content []byte
		err     error
	}
	done := make(chan result, 1)
	out := result{err: ctx.Err()}
	if out.err == nil {
		go func() { // which is left behind where the kernel makes it wait
			content, err := f(step)
			done <- result{content, err}
		}()
		select {
		case out = <-done:
		case <-step.Done():
			select {
			case out = <-done: // of a program that was ended: what it has printed
			case <-time.After(waitDelay + time.Second/2):
				out.err = step.Err()
			}
		}
	}
	if errors.Is(out.err, context.DeadlineExceeded) {
		out.err = errLate
	}
	if strings.HasPrefix(name, "rules/") || name == "journal.txt" {
		r.cfg.Mask.LearnFrom(out.content)
	}
	r.Add(name, what, out.content, out.err)
}

// waitDelay is how long a program that is ended has to close its pipes.
const waitDelay = time.Second / 2

// program returns what runs a program and returns what it prints, up to fileAtMost.
func program(name string, args ...string) func(context.Context) ([]byte, error) {
	return func(ctx context.Context) ([]byte, error) {
		path, err := exec.LookPath(name)
		if err != nil {
			return nil, fmt.Errorf("there is no program %s", name)
		}
		cmd := exec.CommandContext(ctx, path, args...)
		cmd.WaitDelay = waitDelay
		var out, problem limited
		out.room, problem.room = fileAtMost+1, 4<<10
		cmd.Stdout, cmd.Stderr = &out, &problem
		err = cmd.Run()
		if ctx.Err() != nil {
			err = ctx.Err()
		} else if err != nil {
			err = fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(problem.Bytes()))
		}
		return out.Bytes(), err
	}
}

// limited keeps the beginning of what is written to it.
type limited struct {
	bytes.Buffer
	room int
}

func (l *limited) Write(p []byte) (int, error) {
	_, err := l.Buffer.Write(p[:min(len(p), max(l.room-l.Len(), 0))])
	return len(p), err
}

func host(ctx context.Context) ([]byte, error) {
	var b bytes.Buffer
	for _, f := range []string{"/proc/version", "/etc/os-release", "/proc/uptime", "/proc/loadavg", "/proc/meminfo"} {
		text, err := os.ReadFile(f)
		if err != nil {
			text = []byte(err.Error() + "\n")
		}
		lines := bytes.SplitAfterN(text, []byte("\n"), 12)
		fmt.Fprintf(&b, "# %s\n%s\n", f, bytes.Join(lines[:min(len(lines), 11)], nil))
	}
	b.WriteString("# programs\n")
	programs := []string{"nft", "ipset", "ip", "conntrack"}
	for _, v := range []kernel.Variant{kernel.DefaultVariant(), kernel.VariantNFT(), kernel.VariantLegacy()} {
		programs = append(programs, v.Program[service.IPv4])
	}
	for _, name := range programs {
		flag := "--version"
		if name == "ip" {
			flag = "-V"
		}
		text, err := program(name, flag)(ctx)
		if err != nil {
			text = []byte(err.Error() + "\n")
		}
		fmt.Fprintf(&b, "%s: %s", name, text)
	}
	modules, err := os.ReadFile("/proc/modules")
	if err != nil {
		return b.Bytes(), nil // a kernel without
	}
	b.WriteString("\n# modules of netfilter and its like\n")
	for line := range strings.Lines(string(modules)) {
		name, _, _ := strings.Cut(line, " ")
		if strings.Contains(name, "nf") || strings.HasPrefix(name, "x") || strings.HasPrefix(name, "ip") || strings.Contains(name, "br") {
			b.WriteString(line)
		}
	}
	return b.Bytes(), nil
}

// others are settings besides those that kproxy sets or checks.
var others = []string{
	"kernel/osrelease", "fs/nr_open", "fs/file-nr", "net/core/somaxconn", "net/core/rmem_default", "net/netfilter/nf_conntrack_*", "net/nf_conntrack_max", "net/bridge/*",
	"net/ipv4/ip_local_port_range", "net/ipv4/ip_local_reserved_ports", "net/ipv4/tcp_*mem", "net/ipv4/udp_mem", "net/ipv4/tcp_tw_reuse", "net/ipv4/tcp_syncookies",
	"net/ipv4/vs/*", "net/ipv4/conf/all/*", "net/ipv6/conf/all/*", "net/ipv4/conf/*/rp_filter", "net/ipv4/neigh/default/gc_thresh*", "net/ipv6/neigh/default/gc_thresh*",
}

func settings(context.Context) ([]byte, error) {
	var b bytes.Buffer
	for _, s := range kernel.Sysctls() {
		fmt.Fprintf(&b, "%s = %s\t(kproxy: %s, as %s)\n", s.Name, read("/proc/sys/"+strings.ReplaceAll(s.Name, ".", "/")), s.Value, s.Reason)
	}
	b.WriteString("\n")
	for _, pattern := range others {
		names, err := filepath.Glob("/proc/sys/" + pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if strings.HasSuffix(name, "secret") { // stable_secret: of IPv6 addresses
				continue
			}
			fmt.Fprintf(&b, "%s = %s\n", strings.ReplaceAll(strings.TrimPrefix(name, "/proc/sys/"), "/", "."), read(name))
		}
	}
	return b.Bytes(), nil
}

func read(name string) string {
	text, err := os.ReadFile(name)
	if err != nil {
		return "(" + err.Error() + ")"
	}
	return string(bytes.TrimSpace(text))
}

func routingRules(context.Context) ([]byte, error) {
	var b bytes.Buffer
	var errs []error
	for _, f := range []service.Family{service.IPv4, service.IPv6} {
		rules, err := netlink.RuleList(int(f.Number()))
		for _, rule := range rules {
			fmt.Fprintf(&b, "%s %s\n", f, rule)
		}
		errs = append(errs, err)
	}
	return b.Bytes(), errors.Join(errs...)
}

func routes(context.Context) ([]byte, error) {
	var b bytes.Buffer
	var errs []error
	links := map[int]string{}
	for _, f := range []service.Family{service.IPv4, service.IPv6} {
		n := 0
		errs = append(errs, netlink.RouteListFilteredIter(int(f.Number()), &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE, func(route netlink.Route) bool {
			if links[route.LinkIndex] == "" {
				links[route.LinkIndex] = fmt.Sprint(route.LinkIndex)
				if i, err := net.InterfaceByIndex(route.LinkIndex); err == nil {
					links[route.LinkIndex] = i.Name
				}
			}
			fmt.Fprintf(&b, "%s table %d type %d dev %s %s\n", f, route.Table, route.Type, links[route.LinkIndex], route)
			n++
			return n < routesAtMost
		}))
	}
	return b.Bytes(), errors.Join(errs...)
}

func interfaces(context.Context) ([]byte, error) {
	all, err := net.Interfaces()
	var b bytes.Buffer
	for _, i := range all {
		addresses, err := i.Addrs()
		if err != nil {
			return b.Bytes(), err
		}
		fmt.Fprintf(&b, "%d: %s mtu %d %s %s %v\n", i.Index, i.Name, i.MTU, i.Flags, i.HardwareAddr, addresses)
	}
	return b.Bytes(), err
}

// nftables prints all tables by nft, or what can be read without it, as in kproxy's image; then elements as kproxy reads them, some of each
// set: nft takes minutes to list 10,000 services.
func nftables(ctx context.Context) ([]byte, error) {
	b := limited{room: fileAtMost + 1}
	var list []byte
	var err error
	_, missing := exec.LookPath("nft")
	if missing != nil {
		list = []byte("# There is no program nft: chains and rules as kproxy reads them.\n")
	} else {
		list, err = program("nft", "--terse", "list", "ruleset")(ctx)
	}
	b.Write(list)
	for _, f := range []service.Family{service.IPv4, service.IPv6} {
		t, problem := netfilter.Read(ctx, netfilter.DefaultConfig(), f)
		if problem != nil {
			return b.Bytes(), errors.Join(err, problem)
		}
		fmt.Fprintf(&b, "\n# %s\n", f)
		for _, n := range t.Notes {
			fmt.Fprintf(&b, "# %s\n", n)
		}
		if missing != nil {
			t.WriteNFT(&b)
		}
		t.WriteNFTSets(&b, elementsAtMost)
	}
	return b.Bytes(), err
}

func flows(context.Context) ([]byte, error) {
	count, limit, err := conntrack.Use()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "# %d entries, room for %d\n", count, limit)
	sample, err := conntrack.Sample(flowsAtMost)
	for i := range sample {
		f := &sample[i]
		fmt.Fprintf(&b, "%s %s -> %s, replies %s -> %s, state %d, status %#x, mark %#x, %s left, %d packets %d bytes, back %d packets %d bytes\n",
			f.Protocol, f.OrigSrc, f.OrigDst, f.ReplySrc, f.ReplyDst, f.TCPState, f.Status, f.Mark, f.Timeout, f.OrigPackets, f.OrigBytes, f.ReplyPackets, f.ReplyBytes)
	}
	return b.Bytes(), err
}

// counters are files of the network namespace, which all have a bounded length but the virtual servers.
func counters(context.Context) ([]byte, error) {
	var b bytes.Buffer
	for _, f := range []string{"snmp", "netstat", "sockstat", "sockstat6", "snmp6", "stat/nf_conntrack", "softnet_stat", "ip_vs_stats", "ip_vs"} {
		text, err := os.ReadFile("/proc/thread-self/net/" + f)
		if errors.Is(err, os.ErrNotExist) {
			continue
		} else if err != nil {
			return b.Bytes(), err
		}
		fmt.Fprintf(&b, "# /proc/net/%s\n%s\n", f, decimal(text))
	}
	return slices.Clip(b.Bytes()), nil
}

// hexAddress is an address and a port of virtual servers (ip_vs_info_seq_show in net/netfilter/ipvs/ip_vs_ctl.c).
var hexAddress = regexp.MustCompile(`(?:\b[0-9A-F]{8}|\[[0-9a-f:]+\]):[0-9A-F]{4}\b`)

// decimal writes the addresses and ports of virtual servers as people do.
func decimal(text []byte) []byte {
	return hexAddress.ReplaceAllFunc(text, func(found []byte) []byte {
		host, port := found[:len(found)-5], found[len(found)-4:]
		if a, err := hex.DecodeString(string(host)); err == nil {
			host = netip.AddrFrom4([4]byte(a)).AppendTo(nil)
		}
		n, _ := strconv.ParseUint(string(port), 16, 16)
		return fmt.Appendf(nil, "%s:%d", host, n)
	})
}
