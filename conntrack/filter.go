package conntrack

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A program of the classic packet filter, for netlink messages: what it returns
// 0 for isn't put into the socket's queue (do_one_broadcast in
// net/netlink/af_netlink.c). Two of its loads look for attributes: A says where to
// begin, X which, and A is then where the attribute is, or 0.
type program struct {
	code    []unix.SockFilter
	deliver []int // jumps to the end, where messages are let in
}

// Words of the filter's memory.
const (
	wordOrig  = 0
	wordReply = 1
	wordDst   = 2
	wordSrc   = 3
	wordValue = 4
)

// attributesBegin is where a message's attributes do, after struct nlmsghdr and
// struct nfgenmsg.
const attributesBegin = unix.NLMSG_HDRLEN + header

// attributeHeader is the length of struct nlattr.
const attributeHeader = unix.SizeofNlAttr

// Loads of linux/filter.h that look for an attribute: of the message, and in
// another one (SKF_AD_OFF + SKF_AD_NLATTR, SKF_AD_NLATTR_NEST).
const (
	loadAttribute uint32 = 1<<32 - 0x1000 + 12
	loadNested    uint32 = 1<<32 - 0x1000 + 16
)

// interesting lets in the ends of flows whose destination was rewritten, and
// whatever it doesn't understand. Nobody asks for the others, see
// [Flow.Rewritten]; among them are all of userspace's connections to endpoints.
//
// Where closedAt isn't 0, it keeps away TCP connections as well that were answered
// from that port and were closed in the ordinary way.
func interesting(closedAt uint16) []unix.SockFilter {
	var p program
	for _, t := range []struct{ kind, word uint32 }{{ctaTupleOrig, wordOrig}, {ctaTupleReply, wordReply}} {
		p.add(unix.BPF_LD|unix.BPF_IMM, attributesBegin)
		p.find(loadAttribute, t.kind)
		p.add(unix.BPF_ST, t.word)
	}
	if closedAt != 0 {
		p.dropClosed(closedAt)
	}
	p.add(unix.BPF_LD|unix.BPF_B|unix.BPF_ABS, unix.NLMSG_HDRLEN) // nfgen_family
	var v4, v6 program
	v4.sameAddress(ctaIPv4Dst, ctaIPv4Src, 1)
	v6.sameAddress(ctaIPv6Dst, ctaIPv6Src, 4)
	v4.add(unix.BPF_JMP|unix.BPF_JA, uint32(len(v6.code)))
	p.jump(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, unix.AF_INET6, uint8(len(v4.code)), 0)
	p.append(&v4)
	p.append(&v6)
	p.nested(wordOrig, ctaTupleProto, ctaProtoDstPort, wordDst)
	p.nested(wordReply, ctaTupleProto, ctaProtoSrcPort, wordSrc)
	p.same(unix.BPF_H, 0)
	p.add(unix.BPF_RET|unix.BPF_K, 0)
	for _, i := range p.deliver {
		p.code[i].Jf = uint8(len(p.code) - i - 1)
	}
	p.add(unix.BPF_RET|unix.BPF_K, ^uint32(0))
	return p.code
}

// dropClosed drops TCP connections that were answered from a port and are in one of
// the states from TIME_WAIT on, see [Flow.CutShort]. Only those of TCP have a state
// there.
func (p *program) dropClosed(port uint16) {
	var state program // of a connection that was answered from there
	state.add(unix.BPF_LD|unix.BPF_IMM, attributesBegin)
	state.find(loadAttribute, ctaProtoInfo)
	state.find(loadNested, ctaProtoInfoTCP)
	state.find(loadNested, ctaProtoInfoTCPState)
	state.add(unix.BPF_MISC|unix.BPF_TAX, 0)
	state.add(unix.BPF_LD|unix.BPF_B|unix.BPF_IND, attributeHeader)
	state.unless(unix.BPF_JGE|unix.BPF_K, tcpTimeWait)
	state.add(unix.BPF_RET|unix.BPF_K, 0)
	p.nested(wordReply, ctaTupleProto, ctaProtoSrcPort, wordSrc)
	p.add(unix.BPF_LDX|unix.BPF_MEM, wordSrc)
	p.add(unix.BPF_LD|unix.BPF_H|unix.BPF_IND, attributeHeader)
	p.jump(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, uint32(port), 0, uint8(len(state.code)))
	p.append(&state)
}

func (p *program) add(code uint16, k uint32) { p.jump(code, k, 0, 0) }

func (p *program) jump(code uint16, k uint32, yes, no uint8) {
	p.code = append(p.code, unix.SockFilter{Code: code, Jt: yes, Jf: no, K: k})
}

// unless goes on where a comparison holds, and else to the end.
func (p *program) unless(comparison uint16, k uint32) {
	p.deliver = append(p.deliver, len(p.code))
	p.add(unix.BPF_JMP|comparison, k)
}

func (p *program) append(q *program) {
	for _, i := range q.deliver {
		p.deliver = append(p.deliver, len(p.code)+i)
	}
	p.code = append(p.code, q.code...)
}

// find looks for an attribute from A on (loadAttribute), or in the one that A is
// (loadNested).
func (p *program) find(load, kind uint32) {
	p.add(unix.BPF_LDX|unix.BPF_IMM, kind)
	p.add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, load)
	p.unless(unix.BPF_JGE|unix.BPF_K, 1)
}

// nested keeps where the attribute is that lies two levels deep in a tuple.
func (p *program) nested(tuple, outer, inner, word uint32) {
	p.add(unix.BPF_LD|unix.BPF_MEM, tuple)
	p.find(loadNested, outer)
	p.find(loadNested, inner)
	p.add(unix.BPF_ST, word)
}

// sameAddress goes on where the destination is who answers.
func (p *program) sameAddress(dst, src uint32, words int) {
	p.nested(wordOrig, ctaTupleIP, dst, wordDst)
	p.nested(wordReply, ctaTupleIP, src, wordSrc)
	for i := range words {
		p.same(unix.BPF_W, uint32(4*i))
	}
}

// same goes on where both attributes have the same at an offset.
func (p *program) same(size uint16, offset uint32) {
	offset += attributeHeader
	p.add(unix.BPF_LDX|unix.BPF_MEM, wordDst)
	p.add(unix.BPF_LD|size|unix.BPF_IND, offset)
	p.add(unix.BPF_ST, wordValue)
	p.add(unix.BPF_LDX|unix.BPF_MEM, wordSrc)
	p.add(unix.BPF_LD|size|unix.BPF_IND, offset)
	p.add(unix.BPF_LDX|unix.BPF_MEM, wordValue)
	p.unless(unix.BPF_JEQ|unix.BPF_X, 0)
}

// attach makes a socket take only what a filter lets in.
func attach(conn syscall.RawConn, code []unix.SockFilter) (err error) {
	f := unix.SockFprog{Len: uint16(len(code)), Filter: unsafe.SliceData(code)}
	ctrlErr := conn.Control(func(fd uintptr) { err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &f) })
	if ctrlErr != nil {
		err = ctrlErr
	}
	if err != nil {
		return fmt.Errorf("attach filter: %w", err)
	}
	return nil
}
