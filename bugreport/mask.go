package bugreport

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Mask replaces addresses and names, the same ones by the same ones under one key, which isn't in the archive. Addresses that
// share a prefix share one afterwards (prefix-preserving, Xu et al. 2002), so that networks, routes and rules still tell. A nil
// Mask replaces nothing.
type Mask struct {
	key   []byte
	names map[string]bool
	addrs map[netip.Addr]netip.Addr
	bits  map[netip.Prefix]bool // whether the bit that follows a prefix is flipped
}

// NewMask returns a mask with a key.
func NewMask(key []byte) *Mask {
	return &Mask{key: key, names: map[string]bool{}, addrs: map[netip.Addr]netip.Addr{}, bits: map[netip.Prefix]bool{}}
}

// wellKnown are names that tell nothing of who runs the cluster.
var wellKnown = []string{
	"", "default", "kube-system", "kube-public", "kube-node-lease", "kubernetes", "kube-dns", "kproxy", "kproxy-ui", "localhost",
	"http", "https", "grpc", "dns", "dns-tcp", "metrics", "tcp", "udp", "sctp", "api", "line", "datagram",
}

// Learn has a name replaced wherever it stands by itself. Addresses are replaced anyway.
func (m *Mask) Learn(names ...string) {
	for _, n := range names {
		if _, err := netip.ParseAddr(n); m != nil && err != nil && !slices.Contains(wellKnown, n) {
			m.names[n] = true
		}
	}
}

// ruleComment is how kproxy's rules, and kube-proxy's, name a Service; urlHost is how logs name the API server.
var (
	ruleComment = regexp.MustCompile(`comment "?([a-z0-9][a-z0-9.-]*)/([a-z0-9][a-z0-9.-]*)(?::([a-z0-9-]+))?`)
	urlHost     = regexp.MustCompile(`https?://([A-Za-z0-9][A-Za-z0-9.-]*)`)
)

// LearnFrom learns the Services that rules name, as of a kproxy that is dead nothing else tells, and the hosts of URLs.
func (m *Mask) LearnFrom(text []byte) {
	if m == nil {
		return
	}
	for _, found := range slices.Concat(ruleComment.FindAllSubmatch(text, -1), urlHost.FindAllSubmatch(text, -1)) {
		for _, name := range found[1:] {
			m.Learn(string(name))
		}
	}
}

// digest returns a keyed hash.
func (m *Mask) digest(parts ...[]byte) []byte {
	h := hmac.New(sha256.New, m.key)
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}

// name returns what a name is replaced by.
func (m *Mask) name(n string) string {
	if m == nil || slices.Contains(wellKnown, n) {
		return n
	}
	return "name-" + hex.EncodeToString(m.digest([]byte("name "), []byte(n)))[:10]
}

// kept are addresses that mean the same on every host.
var kept = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("::/128"), netip.MustParsePrefix("0.0.0.0/32"),
	netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("ff00::/8")}

// addr returns what an address is replaced by.
func (m *Mask) addr(a netip.Addr) netip.Addr {
	if a.Is4In6() {
		return netip.AddrFrom16(m.addr(a.Unmap()).As16())
	}
	if slices.ContainsFunc(kept, func(p netip.Prefix) bool { return p.Contains(a) }) {
		return a
	}
	if out, ok := m.addrs[a]; ok {
		return out
	}
	out := m.prefix(a, a.BitLen())
	m.addrs[a] = out
	return out
}

// prefix replaces the first bits of an address and clears the rest.
func (m *Mask) prefix(a netip.Addr, bits int) netip.Addr {
	have := a.AsSlice()
	out := make([]byte, len(have))
	first := 0
	if a.IsLinkLocalUnicast() { // stays recognizable as such
		first = min(16, bits)
		copy(out, have[:2])
	}
	for i := first; i < bits; i++ {
		p := netip.PrefixFrom(a, i).Masked()
		flip, known := m.bits[p]
		if !known {
			flip = m.digest([]byte("bit "), []byte(p.String()))[0]&1 != 0
			m.bits[p] = flip
		}
		bit := have[i/8] >> (7 - i%8) & 1
		if flip {
			bit ^= 1
		}
		out[i/8] |= bit << (7 - i%8)
	}
	to, _ := netip.AddrFromSlice(out)
	return to
}

// network is addr of what is written as a network, whose host bits stay clear.
func (m *Mask) network(p netip.Prefix) netip.Addr {
	if p.Addr() != p.Masked().Addr() || slices.ContainsFunc(kept, func(k netip.Prefix) bool { return k.Contains(p.Addr()) && k.Bits() <= p.Bits() }) {
		return m.addr(p.Addr())
	}
	return m.prefix(p.Addr(), p.Bits())
}

// apply replaces what the mask is about in a text.
func (m *Mask) apply(text []byte) []byte {
	if m == nil {
		return text
	}
	out := make([]byte, 0, len(text)+len(text)/16)
	for i := 0; i < len(text); {
		n := 1
		switch c := text[i]; {
		case isWord(c) || c == ':':
			out, n = m.word(out, text[i:])
		case c == '\\' || c == '%':
			n = max(n, len(escaped.Find(text[i:min(i+escapedAtMost, len(text))])))
			fallthrough
		default:
			out = append(out, text[i:i+n]...)
		}
		i += n
	}
	return out
}

// escaped matches what stands for a character that words don't have, in JSON, in strings that Go quotes and in URLs. What
// follows is another word.
var escaped = regexp.MustCompile(`^(?:\\(?:[abfnrtv]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})|%(?:2[0-9A-Fa-f]|3[A-Fa-f]))`)

const escapedAtMost = len(`\U0001f600`)

func isWord(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '.' || c == '_' || c == '-'
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F' }

// addressAtMost is how long an address is, with a separator after it.
const addressAtMost = len("ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255:")

// prefixLength matches the length behind the address of a network, hardwareAddress one of Ethernet.
var (
	prefixLength    = regexp.MustCompile(`^/[0-9]{1,3}`)
	hardwareAddress = regexp.MustCompile(`^(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}$`)
)

// inWord is an address of IPv4 as part of a word: "ip-10.1.2.3".
var inWord = regexp.MustCompile(`[1-9][0-9]{0,2}(?:\.[0-9]{1,3}){3}`)

// reverseName matches what DNS calls an address or a network (RFC 1035, section 3.5; RFC 3596, section 2.5).
var reverseName = regexp.MustCompile(`(?i)(?:((?:[0-9]{1,3}\.){1,4})in-addr|((?:[0-9a-f]\.){1,32})ip6)\.arpa`)

// reversed replaces what labels stand for, the last one first, each of which has so many bits.
func (m *Mask) reversed(labels string, bits int) string {
	have, base := make([]byte, 4), 10
	if bits == 4 {
		have, base = make([]byte, 16), 16
	}
	parts := strings.Split(strings.TrimSuffix(labels, "."), ".")
	slices.Reverse(parts)
	for i, p := range parts {
		v, err := strconv.ParseUint(p, base, bits)
		if err != nil {
			return labels
		}
		have[i*bits/8] |= byte(v << (8 - bits - i*bits%8))
	}
	a, _ := netip.AddrFromSlice(have)
	masked := m.network(netip.PrefixFrom(a, bits*len(parts))).AsSlice()
	for i := range parts {
		parts[i] = strconv.FormatUint(uint64(masked[i*bits/8]>>(8-bits-i*bits%8))&(1<<bits-1), base)
	}
	slices.Reverse(parts)
	return strings.Join(parts, ".") + "."
}

// word replaces what a text begins with, an address or a word, and returns how long that is.
func (m *Mask) word(out, text []byte) ([]byte, int) {
	n := 0
	for n < len(text) && isWord(text[n]) {
		n++
	}
	name := string(text[:n])
	dots := strings.Count(name, ".")
	if dots > 0 && m.names[name] { // it may begin with an address
		return append(out, m.name(name)...), n
	}
	if at := reverseName.FindStringSubmatchIndex(name); at != nil && at[0] > 0 {
		return m.replaceName(out, name[:at[0]]), at[0]
	} else if at != nil && at[2] == 0 {
		return append(out, m.reversed(name[:at[3]], 8)...), at[3]
	} else if at != nil {
		return append(out, m.reversed(name[:at[5]], 4)...), at[5]
	}
	if masked, size := m.address(text); size > 0 {
		return append(out, masked...), size
	}
	if n == 0 || text[0] == '-' { // of a flag, or a range
		return append(out, text[0]), 1
	}
	if dots >= 3 && !m.names[name] {
		if at := inWord.FindStringIndex(name); at != nil && at[0] > 0 {
			n = at[0]
		}
	}
	if at := strings.LastIndexAny(name, "-_."); at >= 0 && n < len(text) && text[n] == ':' { // "peer-fd00::1"
		if _, size := m.address(text[at+1:]); size > 0 {
			n = at + 1
		}
	}
	return m.replaceName(out, name[:n]), n
}

// address returns what the address is replaced by that a text begins with, and how long that is; 0 without one.
func (m *Mask) address(text []byte) (masked string, size int) {
	for size < min(len(text), addressAtMost) && (isHex(text[size]) || text[size] == ':' || text[size] == '.') {
		size++
	}
	for ; bytes.ContainsAny(text[:size], ":."); size = bytes.LastIndexAny(text[:size], ":.") { // a port may follow, or a domain
		if a, err := netip.ParseAddr(string(text[:size])); err == nil {
			if p, err := netip.ParsePrefix(string(text[:size+len(prefixLength.Find(text[size:]))])); err == nil {
				return m.network(p).String(), size
			}
			return m.addr(a).String(), size
		}
		if hardwareAddress.Match(text[:size]) {
			sum := m.digest([]byte("mac "), bytes.ToLower(text[:size]))
			sum[0] = 2 // locally administered
			return net.HardwareAddr(sum[:6]).String(), size
		}
	}
	return "", 0
}

// replaceName replaces a word that is a known name, or begins with one and a dash, as pods' do with their workloads'. Of a name
// with dots, its parts.
func (m *Mask) replaceName(out []byte, word string) []byte {
	if m.names[word] {
		return append(out, m.name(word)...)
	}
	parts := strings.Split(word, ".")
	for i, part := range parts {
		if m.names[part] || m.startsWithName(part) {
			parts[i] = m.name(part)
		}
	}
	return append(out, strings.Join(parts, ".")...)
}

func (m *Mask) startsWithName(word string) bool {
	for i := 1; i < len(word); i++ {
		if word[i] == '-' && m.names[word[:i]] {
			return true
		}
	}
	return false
}
