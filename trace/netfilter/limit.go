package netfilter

import (
	"bufio"
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// A limit lets at least one packet pass at once, and one connection's packets are few: a new connection keeps within it
// unless others have used it up, which the kernel tells of few limits. It is taken for within, and the step says so;
// but not where that would have a rule stop the packet.

// within answers for a limit about which nothing more is known: over says that it matches what exceeds the limit.
func within(over bool, limit string) matched {
	m := matched{answer: Yes, assumes: "a new connection keeps within " + limit + ", unless others have used it up"}
	if over {
		m.answer, m.why = No, m.assumes
	}
	return m
}

// assumed allows an assumption to say that a rule lets a packet pass, or doesn't match. That one stops a packet, or leads to
// what may, is undecided.
func assumed(m matched, passes bool) matched {
	if m.assumes == "" || m.answer == No || m.answer == Maybe || passes {
		return m
	}
	return matched{answer: Maybe, why: m.assumes}
}

// limits has the matches of iptables that count packets or connections.
var limits = map[string]func(w *walker, p *Packet, e *extension) matched{"limit": limit, "hashlimit": hashlimit, "connlimit": connlimit, "connbytes": connbytes}

func limit(_ *walker, _ *Packet, e *extension) matched {
	return within(false, "--limit "+e.arg("--limit"))
}

// hashlimit has a limit for each address or port, whose state the kernel tells: without one, nothing has been used up.
func hashlimit(_ *walker, p *Packet, e *extension) matched {
	over, rate := e.has("--hashlimit-above"), e.arg("--hashlimit-upto")
	if over {
		rate = e.arg("--hashlimit-above")
	}
	if rate == "" {
		return maybe("the match hashlimit can't be read")
	}
	name := map[service.Family]string{service.IPv4: "ipt_hashlimit", service.IPv6: "ip6t_hashlimit"}[p.Family()]
	text, err := os.ReadFile("/proc/thread-self/net/" + name + "/" + e.arg("--hashlimit-name"))
	if err != nil || !strings.HasPrefix(e.arg("--hashlimit-mode"), "srcip") || e.has("--hashlimit-srcmask") {
		return within(over, "hashlimit "+rate)
	}
	used, found := hashed(text, p.Src.Addr())
	why := fmt.Sprintf("%s has used up hashlimit %s", p.Src.Addr(), rate)
	switch {
	case !found && e.arg("--hashlimit-mode") == "srcip", found && !used:
		return is(!over, false, "%s is within hashlimit %s", p.Src.Addr(), rate)
	case found && used && e.arg("--hashlimit-mode") == "srcip":
		return maybe("%s: it is over until that is filled again (-m hashlimit)", why)
	}
	return within(over, "hashlimit "+rate)
}

// hashed looks for an address as source in what the kernel prints of a hashlimit: "9 10.1.0.2:0->0.0.0.0:0 160000 160000
// 32000", which are seconds, credit, its limit, and what a packet costs (dl_seq_real_show in net/netfilter/xt_hashlimit.c).
func hashed(text []byte, src netip.Addr) (used, found bool) {
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 5 {
			continue
		}
		from, _, _ := strings.Cut(f[1], "->")
		at := strings.LastIndexByte(from, ':')
		a, err := netip.ParseAddr(strings.Trim(from[:max(at, 0)], "[]"))
		if err != nil || a != src {
			continue
		}
		credit, err1 := strconv.ParseUint(f[2], 10, 64)
		cost, err2 := strconv.ParseUint(f[4], 10, 64)
		found = true
		used = used || err1 != nil || err2 != nil || credit < cost
	}
	return used, found
}

// connlimit counts connections, this one included.
func connlimit(_ *walker, _ *Packet, e *extension) matched {
	for name, over := range map[string]bool{"--connlimit-above": true, "--connlimit-upto": false} {
		o, ok := e.find(name)
		if n, err := strconv.ParseUint(o.arg(0), 10, 32); ok && err == nil {
			if n == 0 {
				return is(over, o.not, "it is a connection more than %d", n)
			}
			return within(over != o.not, fmt.Sprintf("%d connections (-m connlimit)", n))
		}
	}
	return maybe("the match connlimit can't be read")
}

// connbytes asks what a connection has carried, which is a packet at first.
func connbytes(_ *walker, p *Packet, e *extension) matched {
	o, ok := e.find("--connbytes")
	least, _, _ := strings.Cut(o.arg(0), ":")
	if n, err := strconv.ParseUint(least, 10, 64); ok && err == nil && !o.not && p.State == New && (n > 1<<16 || n > 1 && e.arg("--connbytes-mode") == "packets") {
		return matched{answer: No, why: "the connection has carried a packet, not " + least + " " + e.arg("--connbytes-mode")}
	}
	return maybe("it depends on how much the connection has carried (-m connbytes)")
}

// recent remembers clients. Remembering always matches (recent_mt in net/netfilter/xt_recent.c). What it remembers the kernel
// tells, with the times at which they came.
func recent(_ *walker, p *Packet, e *extension) matched {
	name := e.arg("--name")
	if o, ok := e.find("--set"); ok {
		p.remembered += " " + name + " "
		return is(true, o.not, "it is remembered")
	}
	o, ok := e.find("--rcheck")
	if !ok {
		if o, ok = e.find("--update"); !ok {
			return maybe("it depends on who came lately (-m recent)")
		}
	}
	a := p.Src.Addr()
	if e.has("--rdest") {
		a = p.Dst.Addr()
	}
	text, err := os.ReadFile("/proc/thread-self/net/xt_recent/" + name)
	if err != nil || e.has("--mask") && !strings.HasPrefix(e.arg("--mask"), "255.255.255.255") && !strings.HasPrefix(e.arg("--mask"), "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff") {
		return maybe("it depends on who came lately (-m recent)")
	}
	times := remembers(string(text), a)
	if strings.Contains(p.remembered, " "+name+" ") {
		times++
	}
	if least, _ := strconv.Atoi(e.arg("--hitcount")); times < max(1, least) {
		return is(false, o.not, "%s came %d times, as far as list %s remembers", a, times, name)
	}
	return maybe("it depends on when %s came last (-m recent --name %s)", a, name)
}

// remembers counts how often an address came: "src=10.1.0.2 ttl: 63 last_seen: 4295 oldest_pkt: 2 4294, 4295"
// (recent_seq_show in net/netfilter/xt_recent.c).
func remembers(text string, a netip.Addr) int {
	for line := range strings.SplitSeq(text, "\n") {
		f := strings.Fields(line)
		if len(f) < 7 {
			continue
		}
		if src, err := netip.ParseAddr(strings.TrimPrefix(f[0], "src=")); err == nil && src == a {
			return len(f) - 7
		}
	}
	return 0
}

// limitText writes a limit as nft does (limit_stmt_print in its src/statement.c).
func limitText(a attributes) string {
	units := map[uint64]string{1: "second", 60: "minute", 3600: "hour", 86400: "day", 604800: "week"}
	over := ""
	if a.number(unix.NFTA_LIMIT_FLAGS)&unix.NFT_LIMIT_F_INV != 0 {
		over = "over "
	}
	rate, burst := a.number(unix.NFTA_LIMIT_RATE), a.number(unix.NFTA_LIMIT_BURST)
	if a.number(unix.NFTA_LIMIT_TYPE) == unix.NFT_LIMIT_PKT_BYTES {
		text := fmt.Sprintf("limit rate %s%s/%s", over, size(rate), units[a.number(unix.NFTA_LIMIT_UNIT)])
		if burst > 0 {
			text += " burst " + size(burst)
		}
		return text
	}
	text := fmt.Sprintf("limit rate %s%d/%s", over, rate, units[a.number(unix.NFTA_LIMIT_UNIT)])
	if burst != 5 { // nft's default
		text += fmt.Sprintf(" burst %d packets", burst)
	}
	return text
}

// size writes a number of bytes as nft does.
func size(n uint64) string {
	unit := "bytes"
	for _, larger := range []string{"kbytes", "mbytes"} {
		if n == 0 || n%1024 != 0 {
			break
		}
		n, unit = n/1024, larger
	}
	return fmt.Sprintf("%d %s", n, unit)
}

// limited returns what an expression that counts packets or connections matches; nil for one that doesn't count. The text is nft's.
func limited(name string, a attributes) (text string, holds func(p *Packet) matched) {
	switch name {
	case "limit":
		text = limitText(a)
		over := a.number(unix.NFTA_LIMIT_FLAGS)&unix.NFT_LIMIT_F_INV != 0
		return text, func(*Packet) matched { return within(over, text) }
	case "connlimit":
		const count, flags = 1, 2 // NFTA_CONNLIMIT_COUNT, NFTA_CONNLIMIT_FLAGS
		n, over := a.number(count), a.number(flags)&1 != 0
		text = fmt.Sprintf("ct count %s%d", map[bool]string{true: "over "}[over], n)
		return text, func(*Packet) matched {
			if n == 0 { // this connection counts
				return is(over, false, "it is a connection more than %d", n)
			}
			return within(over, text)
		}
	case "quota":
		limit, used, over := a.number(unix.NFTA_QUOTA_BYTES), a.number(unix.NFTA_QUOTA_CONSUMED), a.number(unix.NFTA_QUOTA_FLAGS)&1 != 0
		text = fmt.Sprintf("quota %s%s", map[bool]string{true: "over "}[over], size(limit))
		if used > 0 {
			text += " used " + size(used)
		}
		return text, func(p *Packet) matched {
			n := uint64(p.length())
			if n == 0 && used < limit {
				return maybe("how much of it is left is too little to tell (quota)")
			}
			return is((used+n >= limit) == over, false, "of %s, %s are used", size(limit), size(used))
		}
	}
	return "", nil
}
