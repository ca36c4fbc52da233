package iptables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// nftWatch watches the nft variant. The kernel counts commits to a network
// namespace's tables: while the count stays, nothing changed. When it moves,
// the rules in kproxy's chains are read raw, without iptables, and compared by
// their hashes.
type nftWatch struct {
	families []service.Family
	socket   *nl.SocketHandle
	seed     maphash.Seed

	generation uint32
	prints     map[string]fingerprint // per chain; nil until known
	notBefore  time.Time              // when rules may be read again
}

// fingerprint stands for a chain's rules.
type fingerprint struct {
	rules int
	sum   uint64 // over their handles and expressions, in order
}

// Reading all rules takes a second where there are 10,000 services. Programs
// that change their own rules all the time don't make kproxy do so all the
// time: between two readings passes restFactor times what one takes, but not
// so much that damage is found later than 5 s after it was done.
const (
	restFactor = 4
	restMax    = 2 * time.Second
)

func newNFTWatch(families []service.Family) (*nftWatch, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	return &nftWatch{families: families, socket: &nl.SocketHandle{Socket: s}, seed: maphash.MakeSeed()}, nil
}

func (w *nftWatch) close() { w.socket.Socket.Close() }

func (w *nftWatch) forget() { w.prints = nil }

func (w *nftWatch) check(_ context.Context, want *kernel.Ruleset) ([]string, error) {
	if w.prints == nil {
		return w.learn(want)
	}
	generation, err := w.readGeneration()
	if err != nil || generation == w.generation || time.Now().Before(w.notBefore) {
		return nil, err
	}
	start := time.Now()
	prints, err := w.readPrints()
	if errors.Is(err, errInterrupted) {
		return nil, nil // the next check sees what came of it
	}
	if err != nil {
		return nil, err
	}
	if damage := comparePrints(prints, w.prints); len(damage) > 0 {
		return damage, nil
	}
	w.generation = generation
	w.notBefore = time.Now().Add(min(restFactor*time.Since(start), restMax))
	return nil, nil
}

// learn takes the rules that there are as the norm, if the number of rules
// in every chain is what it should be.
func (w *nftWatch) learn(want *kernel.Ruleset) ([]string, error) {
	generation, err := w.readGeneration()
	if err != nil {
		return nil, err
	}
	prints, err := w.readPrints()
	if errors.Is(err, errInterrupted) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	expected := map[string]int{}
	for _, f := range w.families {
		for _, c := range want.Chains[f] {
			expected[printKey(f, c.Table, c.Name)] += len(c.Rules)
		}
		for _, j := range want.Jumps[f] {
			expected[printKey(f, j.Table, j.From)]++
		}
	}
	var wrong []string
	for key, n := range expected {
		if prints[key].rules != n {
			wrong = append(wrong, key)
		}
	}
	for key := range prints {
		if expected[key] == 0 {
			wrong = append(wrong, key)
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return some("%s was changed", slices.Compact(wrong)), nil
	}
	w.generation, w.prints = generation, prints
	return nil, nil
}

func printKey(f service.Family, table, chain string) string {
	return f.String() + " chain " + table + " " + chain
}

func comparePrints(have, want map[string]fingerprint) []string {
	var wrong []string
	for key, p := range want {
		if have[key] != p {
			wrong = append(wrong, key)
		}
	}
	for key := range have {
		if _, ok := want[key]; !ok {
			wrong = append(wrong, key)
		}
	}
	slices.Sort(wrong)
	return some("%s was changed", wrong)
}

// Attributes of include/uapi/linux/netfilter/nf_tables.h.
const (
	nftaGenID           = 1
	nftaRuleTable       = 1
	nftaRuleChain       = 2
	nftaRuleHandle      = 3
	nftaRuleExpressions = 4
	nftaExprName        = 1
)

func (w *nftWatch) readGeneration() (uint32, error) {
	msgs, err := w.request(unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, 0, nil)
	if err != nil {
		return 0, fmt.Errorf("read generation: %w", err)
	}
	for _, m := range msgs {
		for typ, v := range kernel.Attributes(m[min(len(m), nl.SizeofNfgenmsg):]) {
			if typ == nftaGenID && len(v) >= 4 {
				return binary.BigEndian.Uint32(v), nil
			}
		}
	}
	return 0, errors.New("read generation: no answer")
}

// readPrints reads the rules in kproxy's chains, and of those in
// built-in chains that lead there.
func (w *nftWatch) readPrints() (map[string]fingerprint, error) {
	out := map[string]fingerprint{}
	for _, f := range w.families {
		for _, table := range ownTables {
			family := uint8(unix.AF_INET)
			if f == service.IPv6 {
				family = unix.AF_INET6
			}
			filter := nl.NewRtAttr(nftaRuleTable, nl.ZeroTerminated(table)).Serialize()
			msgs, err := w.request(unix.NFT_MSG_GETRULE, family, unix.NLM_F_DUMP, filter)
			switch {
			case errors.Is(err, unix.ENOENT):
				continue // no such table
			case errors.Is(err, netlink.ErrDumpInterrupted), errors.Is(err, unix.EINTR):
				return nil, errInterrupted
			case err != nil:
				return nil, fmt.Errorf("read %s rules of table %s: %w", f, table, err)
			}
			for _, m := range msgs {
				w.addPrint(out, f, m[min(len(m), nl.SizeofNfgenmsg):])
			}
		}
	}
	return out, nil
}

func (w *nftWatch) addPrint(out map[string]fingerprint, f service.Family, rule []byte) {
	var table, chain string
	var handle, expressions []byte
	for typ, v := range kernel.Attributes(rule) {
		switch typ {
		case nftaRuleTable:
			table = kernel.AttributeText(v)
		case nftaRuleChain:
			chain = kernel.AttributeText(v)
		case nftaRuleHandle:
			handle = v
		case nftaRuleExpressions:
			expressions = v
		}
	}
	if !kernel.Own(chain) && !bytes.Contains(expressions, []byte(kernel.Prefix)) || !slices.Contains(ownTables, table) {
		return
	}
	key := printKey(f, table, chain)
	p := out[key]
	var h maphash.Hash
	h.SetSeed(w.seed)
	_ = binary.Write(&h, binary.NativeEndian, p.sum)
	h.Write(handle)
	for _, e := range kernel.Attributes(expressions) {
		if !isCounter(e) {
			h.Write(e)
		}
	}
	out[key] = fingerprint{p.rules + 1, h.Sum64()}
}

// isCounter tells the expression that changes with every packet.
func isCounter(expression []byte) bool {
	for typ, v := range kernel.Attributes(expression) {
		if typ == nftaExprName {
			return kernel.AttributeText(v) == "counter"
		}
	}
	return false
}

func (w *nftWatch) request(cmd int, family uint8, flags int, attrs []byte) ([][]byte, error) {
	req := nl.NewNetlinkRequest(cmd|unix.NFNL_SUBSYS_NFTABLES<<8, unix.NLM_F_REQUEST|flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	if attrs != nil {
		req.AddRawData(attrs)
	}
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: w.socket}
	return req.Execute(unix.NETLINK_NETFILTER, 0)
}
