package iptables

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

// fingerprint stands for a chain's rules.
type fingerprint struct {
	rules int
	sum   uint64 // over their handles and expressions, in order
}

// chainID names a chain of any table.
type chainID struct {
	family      service.Family
	table, name string
}

func (c chainID) String() string { return c.family.String() + " chain " + c.table + " " + c.name }

// Attributes of include/uapi/linux/netfilter/nf_tables.h.
const (
	nftaGenID           = 1
	nftaChainTable      = 1
	nftaChainName       = 3
	nftaRuleTable       = 1
	nftaRuleChain       = 2
	nftaRuleHandle      = 3
	nftaRuleExpressions = 4
	nftaExprName        = 1
)

func (w *nftWatch) readGeneration() (uint32, error) {
	msgs, err := w.request(unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, 0, nil).Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, fmt.Errorf("read generation: %w", err)
	}
	for _, m := range msgs {
		for typ, v := range nlmsg.Attributes(m[min(len(m), nl.SizeofNfgenmsg):]) {
			if typ == nftaGenID && len(v) >= 4 {
				return binary.BigEndian.Uint32(v), nil
			}
		}
	}
	return 0, errors.New("read generation: no answer")
}

// readPrints reads the rules in kproxy's chains, and of those in others that lead
// there, chain by chain: where a dump of a whole table takes more than one message,
// the kernel looks for where it was from the beginning every time
// (__nf_tables_dump_rules), 2,000 times with 10,000 services.
func (w *nftWatch) readPrints() (map[string]fingerprint, error) {
	generation, err := w.readGeneration()
	if err != nil {
		return nil, err
	}
	out := map[string]fingerprint{}
	for _, f := range w.families {
		chains, err := w.readChains(f)
		if err != nil {
			return nil, err
		}
		for _, id := range chains {
			p, err := w.readChain(id)
			if err != nil {
				return nil, err
			}
			if p.rules > 0 {
				out[id.String()] = p
			}
		}
	}
	if now, err := w.readGeneration(); err != nil || now != generation {
		return nil, cmp.Or(err, errInterrupted)
	}
	return out, nil
}

// readChains lists a family's chains of the tables that kproxy has chains in.
func (w *nftWatch) readChains(f service.Family) ([]chainID, error) {
	var out []chainID
	err := w.dump(unix.NFT_MSG_GETCHAIN, f, nil, func(chain []byte) {
		var table, name string
		for typ, v := range nlmsg.Attributes(chain) {
			switch typ {
			case nftaChainTable:
				table = nlmsg.Text(v)
			case nftaChainName:
				name = nlmsg.Text(v)
			}
		}
		if slices.Contains(ownTables, table) {
			out = append(out, chainID{f, table, name})
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read %s chains: %w", f, err)
	}
	return out, nil
}

// readChain reads a chain's rules; none where there is no such chain.
func (w *nftWatch) readChain(id chainID) (fingerprint, error) {
	var out fingerprint
	filter := nl.NewRtAttr(nftaRuleTable, nl.ZeroTerminated(id.table)).Serialize()
	filter = append(filter, nl.NewRtAttr(nftaRuleChain, nl.ZeroTerminated(id.name)).Serialize()...)
	err := w.dump(unix.NFT_MSG_GETRULE, id.family, filter, func(rule []byte) { w.addPrint(&out, id, rule) })
	switch {
	case errors.Is(err, unix.ENOENT):
		return fingerprint{}, nil
	case err != nil:
		return fingerprint{}, fmt.Errorf("read rules of %s: %w", id, err)
	}
	return out, nil
}

func (w *nftWatch) addPrint(to *fingerprint, id chainID, rule []byte) {
	var handle, expressions []byte
	for typ, v := range nlmsg.Attributes(rule) {
		switch {
		case typ == nftaRuleTable && nlmsg.Text(v) != id.table,
			typ == nftaRuleChain && nlmsg.Text(v) != id.name:
			return
		case typ == nftaRuleHandle:
			handle = v
		case typ == nftaRuleExpressions:
			expressions = v
		}
	}
	if !kernel.Own(id.name) && !bytes.Contains(expressions, []byte(kernel.Prefix)) {
		return
	}
	var h maphash.Hash
	h.SetSeed(w.seed)
	h.Write(binary.NativeEndian.AppendUint64(nil, to.sum))
	h.Write(handle)
	for _, e := range nlmsg.Attributes(expressions) {
		if !isCounter(e) {
			h.Write(e)
		}
	}
	*to = fingerprint{to.rules + 1, h.Sum64()}
}

// isCounter tells the expression that changes with every packet.
func isCounter(expression []byte) bool {
	for typ, v := range nlmsg.Attributes(expression) {
		if typ == nftaExprName {
			return nlmsg.Text(v) == "counter"
		}
	}
	return false
}

func (w *nftWatch) request(cmd int, family uint8, flags int, attrs []byte) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(cmd|unix.NFNL_SUBSYS_NFTABLES<<8, unix.NLM_F_REQUEST|flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	if attrs != nil {
		req.AddRawData(attrs)
	}
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: w.socket}
	return req
}

// dump hands over what the kernel has of something in family f, one message's
// attributes after the other, which are kept for no longer than each takes.
func (w *nftWatch) dump(cmd int, f service.Family, filter []byte, each func(attrs []byte)) error {
	family := uint8(unix.AF_INET)
	if f == service.IPv6 {
		family = unix.AF_INET6
	}
	err := w.request(cmd, family, unix.NLM_F_DUMP, filter).ExecuteIter(unix.NETLINK_NETFILTER, 0, func(m []byte) bool {
		each(m[min(len(m), nl.SizeofNfgenmsg):])
		return true
	})
	if errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) {
		return errInterrupted
	}
	return err
}
