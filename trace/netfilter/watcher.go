package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// What x/sys/unix doesn't have of linux/netfilter/nf_tables.h and nfnetlink.h.
const (
	tableIsOwned = 2 // NFT_TABLE_F_OWNER, Linux 5.12
	groupTraces  = 9 // NFNLGRP_NFTRACE
)

// Bounds of marking: packets a second, and connections in all.
const (
	markedPerSecond = 20
	markedAtMost    = 4096
)

// watchTable is what names of tables begin with that do nothing but mark packets.
const watchTable = "kproxy-watch-"

// Watcher marks packets (nftrace) and hears from the kernel which rules of nf_tables they
// meet. What it needs in the kernel is one table that the kernel deletes with the Watcher's
// socket, however the process ends. It is for one goroutine at a time.
type Watcher struct {
	owner, traces *netlink.Socket
	family        service.Family
	table         string
	states        map[uint64]State // by handle, what the table's own rules have seen of it
	buffer        []byte
	pending       []Sight
}

// Sight is one thing that a marked packet met: a rule, or a base chain's end.
type Sight struct {
	// Packet is the same for what one packet meets, and for others later.
	Packet       uint32
	Table, Chain string // the table with its family: "ip nat"
	Handle       uint64 // of the rule; 0 at a chain's end
	Dropped      bool   // it ends here
	// Begins says that it has been marked, before any rule; Ends that it has met the last
	// base chain of INPUT or POSTROUTING, which is Hook.
	Begins, Ends bool
	Hook         Hook
	// State is conntrack's, at the one sight that tells it.
	State State
	// Src and Dst are as in the packet now; invalid in sights that don't repeat them.
	Src, Dst netip.AddrPort
	In, Out  string // interfaces; empty for none, or where they aren't repeated
}

// Watch begins to mark the first packet that comes of each connection to an address, from
// one client or, if that isn't valid, from any, in the network namespace of the calling
// thread. It needs CAP_NET_ADMIN there.
func Watch(proto service.Protocol, to netip.AddrPort, from netip.Addr) (*Watcher, error) {
	w := &Watcher{family: service.FamilyOf(to.Addr()), table: watchTable + strconv.Itoa(os.Getpid()), buffer: make([]byte, 64<<10)}
	var err error
	if w.owner, err = netlink.Open(unix.NETLINK_NETFILTER, 64<<10); err != nil {
		return nil, err
	}
	if w.traces, err = netlink.Open(unix.NETLINK_NETFILTER, 0); err != nil {
		return nil, errors.Join(err, w.owner.Close())
	}
	// Before packets are marked: the kernel tells only those who listen (nft_trace_notify in
	// net/netfilter/nf_tables_trace.c).
	_ = unix.SetsockoptInt(w.traces.FD, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(w.traces.FD, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, groupTraces))
	if err == nil {
		err = w.owner.Transaction(unix.NFNL_SUBSYS_NFTABLES, w.requests(proto, to, from))
	}
	if err == nil {
		err = w.readStates()
	}
	if err != nil {
		w.Close()
		var refused *netlink.RequestError
		switch {
		case errors.Is(err, unix.EPERM):
			return nil, errors.Join(kernel.ErrPermission, err)
		case errors.As(err, &refused) && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)):
			return nil, &kernel.Missing{What: "nf_tables whose tables end with their owner", How: "Linux 5.12 or later", Err: err}
		}
		return nil, fmt.Errorf("mark packets: %w", err)
	}
	return w, nil
}

// Close ends the marking, and takes the table away.
func (w *Watcher) Close() error { return errors.Join(w.owner.Close(), w.traces.Close()) }

// The base chains of the table: packets are marked before any rule but those of devices, the
// state is known behind conntrack, and the last ones see what has become of addresses.
var watchChains = []struct {
	name     string
	hook     Hook
	priority int
}{
	{"arrives", Prerouting, priorityRaw - 50}, {"originates", Output, priorityRaw - 50},
	{"arrived", Prerouting, priorityConntrack + 1}, {"originated", Output, priorityConntrack + 1},
	{"delivered", Input, priorityNATSrc + 150}, {"leaves", Postrouting, priorityNATSrc + 150},
}

func isMarking(chain string) bool { return chain == "arrives" || chain == "originates" }

// watchStates are conntrack's states, each with a rule of its own in the chains that tell it.
var watchStates = []State{New, Established, Related, Invalid, Untracked}

const watchSet = "seen"

// requests make the table.
func (w *Watcher) requests(proto service.Protocol, to netip.AddrPort, from netip.Addr) (out [][]byte) {
	addressSize, sourceAt, destinationAt := uint32(4), uint32(12), uint32(16)
	keyType := uint32(7<<6 | 13) // nft's ipv4_addr . inet_service
	if w.family == service.IPv6 {
		addressSize, sourceAt, destinationAt, keyType = 16, 8, 24, 8<<6|13
	}
	out = append(out,
		w.request(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(b []byte) []byte {
			return netlink.AppendUint32(netlink.AppendText(b, unix.NFTA_TABLE_NAME, w.table), unix.NFTA_TABLE_FLAGS, tableIsOwned)
		}),
		w.request(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, func(b []byte) []byte {
			b = netlink.AppendText(netlink.AppendText(b, unix.NFTA_SET_TABLE, w.table), unix.NFTA_SET_NAME, watchSet)
			b = netlink.AppendUint32(netlink.AppendUint32(b, unix.NFTA_SET_FLAGS, unix.NFT_SET_EVAL), unix.NFTA_SET_KEY_TYPE, keyType)
			b = netlink.AppendUint32(netlink.AppendUint32(b, unix.NFTA_SET_KEY_LEN, addressSize+4), unix.NFTA_SET_ID, 1)
			return netlink.AppendNested(b, unix.NFTA_SET_DESC, func(b []byte) []byte {
				const size = 1 // NFTA_SET_DESC_SIZE
				return netlink.AppendUint32(b, size, markedAtMost)
			})
		}))
	for _, c := range watchChains {
		out = append(out, w.request(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(b []byte) []byte {
			b = netlink.AppendText(netlink.AppendText(b, unix.NFTA_CHAIN_TABLE, w.table), unix.NFTA_CHAIN_NAME, c.name)
			b = netlink.AppendNested(b, unix.NFTA_CHAIN_HOOK, func(b []byte) []byte {
				return netlink.AppendUint32(netlink.AppendUint32(b, unix.NFTA_HOOK_HOOKNUM, uint32(slices.Index(nfHooks, c.hook))), unix.NFTA_HOOK_PRIORITY, uint32(int32(c.priority)))
			})
			return netlink.AppendText(b, unix.NFTA_CHAIN_TYPE, "filter")
		}))
	}
	add := func(chain string, more func(*netlink.Expressions)) {
		var e netlink.Expressions
		is := func(v ...byte) { e.Compare(unix.NFT_CMP_EQ, v...) }
		e.Payload(netlink.Register, unix.NFT_PAYLOAD_NETWORK_HEADER, destinationAt, addressSize)
		is(to.Addr().AsSlice()...)
		if from.IsValid() {
			e.Payload(netlink.Register, unix.NFT_PAYLOAD_NETWORK_HEADER, sourceAt, addressSize)
			is(from.AsSlice()...)
		}
		e.Numbers("meta", unix.NFTA_META_DREG, netlink.Register, unix.NFTA_META_KEY, unix.NFT_META_L4PROTO)
		is(byte(proto))
		e.Payload(netlink.Register, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2)
		is(byte(to.Port()>>8), byte(to.Port()))
		more(&e)
		out = append(out, w.request(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(b []byte) []byte {
			b = netlink.AppendText(netlink.AppendText(b, unix.NFTA_RULE_TABLE, w.table), unix.NFTA_RULE_CHAIN, chain)
			return netlink.AppendNested(b, unix.NFTA_RULE_EXPRESSIONS, func(b []byte) []byte { return append(b, e...) })
		}))
	}
	for _, c := range watchChains {
		switch {
		case isMarking(c.name): // clients that haven't been seen, and have them seen
			add(c.name, func(e *netlink.Expressions) {
				e.Payload(netlink.Register, unix.NFT_PAYLOAD_NETWORK_HEADER, sourceAt, addressSize)
				e.Payload(netlink.Register+addressSize/4, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2)
				e.Lookup(watchSet, netlink.Register, unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
				e.Limit(markedPerSecond, markedPerSecond)
				e.Add("dynset", func(b []byte) []byte {
					b = netlink.AppendUint32(netlink.AppendText(b, unix.NFTA_DYNSET_SET_NAME, watchSet), unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_ADD)
					return netlink.AppendUint32(b, unix.NFTA_DYNSET_SREG_KEY, netlink.Register)
				})
				e.Immediate(netlink.Register, 1)
				e.Numbers("meta", unix.NFTA_META_KEY, unix.NFT_META_NFTRACE, unix.NFTA_META_SREG, netlink.Register)
			})
		case c.hook == Prerouting || c.hook == Output:
			for _, s := range watchStates {
				add(c.name, func(e *netlink.Expressions) {
					e.Numbers("ct", unix.NFTA_CT_DREG, netlink.Register, unix.NFTA_CT_KEY, unix.NFT_CT_STATE)
					e.Mask(netlink.Register, native(stateBits[strings.ToLower(string(s))]), native(0))
					e.Compare(unix.NFT_CMP_NEQ, native(0)...)
				})
			}
		}
	}
	return out
}

func (w *Watcher) request(kind, flags uint16, attributes func([]byte) []byte) []byte {
	return attributes(netlink.AppendNetfilter(netlink.AppendRequest(nil, unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags), w.family.Number()))
}

// readStates finds out the handles of the rules that tell the state.
func (w *Watcher) readStates() error {
	w.states = map[uint64]State{}
	at := map[string]int{}
	return netlink.DumpNFTables(unix.NFT_MSG_GETRULE, w.family.Number(), func(b []byte) []byte { return netlink.AppendText(b, unix.NFTA_RULE_TABLE, w.table) }, func(_ uint8, b []byte) {
		a := attributesOf(b)
		chain := netlink.Text(a[unix.NFTA_RULE_CHAIN])
		if netlink.Text(a[unix.NFTA_RULE_TABLE]) != w.table || isMarking(chain) {
			return
		}
		w.states[a.number(unix.NFTA_RULE_HANDLE)] = watchStates[at[chain]%len(watchStates)]
		at[chain]++
	})
}

// Next returns the next sight, and waits for it until the deadline; false if there is none.
func (w *Watcher) Next(deadline time.Time) (Sight, bool, error) {
	for len(w.pending) == 0 {
		wait := time.Until(deadline)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(w.traces.FD), Events: unix.POLLIN}}, max(0, int(wait.Milliseconds())))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return Sight{}, false, os.NewSyscallError("poll", err)
		case n == 0 && wait < time.Millisecond:
			return Sight{}, false, nil
		}
		size, err := unix.Read(w.traces.FD, w.buffer)
		switch err {
		case nil:
		case unix.EINTR, unix.EAGAIN, unix.ENOBUFS: // what was lost, the packet's other sights show
			continue
		default:
			return Sight{}, false, os.NewSyscallError("receive", err)
		}
		for m := range netlink.Messages(w.buffer[:size]) {
			if m.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE && len(m.Body) >= netlink.SizeofNetfilter {
				w.pending = append(w.pending, w.sight(m.Body[0], attributesOf(m.Body[netlink.SizeofNetfilter:])))
			}
		}
	}
	s := w.pending[0]
	w.pending = w.pending[1:]
	return s, true, nil
}

// sight reads one message (nft_trace_notify in net/netfilter/nf_tables_trace.c).
func (w *Watcher) sight(family uint8, a attributes) Sight {
	name := netlink.Text(a[unix.NFTA_TRACE_TABLE])
	s := Sight{
		Packet: uint32(a.number(unix.NFTA_TRACE_ID)), Table: nftFamilies[family] + " " + name, Chain: netlink.Text(a[unix.NFTA_TRACE_CHAIN]),
		Handle: a.number(unix.NFTA_TRACE_RULE_HANDLE), In: linkName(a.number(unix.NFTA_TRACE_IIF)), Out: linkName(a.number(unix.NFTA_TRACE_OIF)),
	}
	s.Src, s.Dst = ends(a[unix.NFTA_TRACE_NETWORK_HEADER], a[unix.NFTA_TRACE_TRANSPORT_HEADER])
	if kind := a.number(unix.NFTA_TRACE_TYPE); kind == unix.NFT_TRACETYPE_POLICY {
		s.Dropped = a.number(unix.NFTA_TRACE_POLICY) == 0 // NF_DROP
	} else if v := attributesOf(a[unix.NFTA_TRACE_VERDICT]); kind == unix.NFT_TRACETYPE_RULE {
		s.Dropped = v.number(unix.NFTA_VERDICT_CODE)&0xff == 0
	}
	if name != w.table {
		return s
	}
	for _, c := range watchChains {
		if c.name == s.Chain {
			s.Hook = c.hook
		}
	}
	s.Begins, s.Ends = isMarking(s.Chain) && s.Handle != 0, s.Hook == Input || s.Hook == Postrouting
	if s.Handle != 0 {
		s.State = w.states[s.Handle]
	}
	s.Table, s.Chain, s.Handle = "", "", 0
	return s
}

// ends are the addresses and ports that headers name; invalid where they are cut short.
func ends(network, transport []byte) (src, dst netip.AddrPort) {
	at, size := 12, 4
	if len(network) > 0 && network[0]>>4 == 6 {
		at, size = 8, 16
	}
	if len(network) < at+2*size || len(transport) < 4 {
		return
	}
	from, _ := netip.AddrFromSlice(network[at : at+size])
	to, _ := netip.AddrFromSlice(network[at+size : at+2*size])
	return netip.AddrPortFrom(from, binary.BigEndian.Uint16(transport)), netip.AddrPortFrom(to, binary.BigEndian.Uint16(transport[2:]))
}

// linkName is an interface's name; its number if it has gone.
func linkName(index uint64) string {
	if index == 0 {
		return ""
	}
	if link, err := net.InterfaceByIndex(int(index)); err == nil {
		return link.Name
	}
	return fmt.Sprint("interface ", index)
}
