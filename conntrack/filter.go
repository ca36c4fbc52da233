package conntrack

import (
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
)

// program is one of the classic packet filter, for netlink messages: what it returns
// 0 for isn't put into the socket's queue (do_one_broadcast in
// net/netlink/af_netlink.c). Two of its loads look for attributes: A says where to
// begin, X which, and A is then where the attribute is, or 0.
type program struct {
	code    []bpf.Instruction
	deliver []int // jumps to the end, where messages are let in
}

// Words of the filter's memory.
const (
	wordOrig = iota
	wordReply
	wordDst
	wordSrc
	wordValue
)

// attributesBegin is where a message's attributes do.
const attributesBegin = unix.NLMSG_HDRLEN + netlink.SizeofNetfilter

// interesting lets in the ends of flows whose destination was rewritten, and
// whatever it doesn't understand. Nobody asks for the others, see
// [Flow.Rewritten]; among them are all of userspace's connections to endpoints.
//
// Where closedAt isn't 0, it keeps away TCP connections as well that were answered
// from that port and were closed in the ordinary way.
func interesting(closedAt uint16) ([]bpf.RawInstruction, error) {
	var p program
	for word, kind := range [...]uint32{wordOrig: ctaTupleOrig, wordReply: ctaTupleReply} {
		p.add(bpf.LoadConstant{Dst: bpf.RegA, Val: attributesBegin})
		p.find(bpf.ExtNetlinkAttr, kind)
		p.add(bpf.StoreScratch{Src: bpf.RegA, N: word})
	}
	if closedAt != 0 {
		p.dropClosed(closedAt)
	}
	p.add(bpf.LoadAbsolute{Off: unix.NLMSG_HDRLEN, Size: 1}) // nfgen_family
	var v4, v6 program
	v4.sameAddress(ctaIPv4Dst, ctaIPv4Src, 1)
	v6.sameAddress(ctaIPv6Dst, ctaIPv6Src, 4)
	v4.add(bpf.Jump{Skip: uint32(len(v6.code))})
	p.add(bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET6, SkipTrue: uint8(len(v4.code))})
	p.append(&v4)
	p.append(&v6)
	p.nested(wordOrig, ctaTupleProto, ctaProtoDstPort, wordDst)
	p.nested(wordReply, ctaTupleProto, ctaProtoSrcPort, wordSrc)
	p.same(2, 0)
	p.add(bpf.RetConstant{Val: 0})
	for _, i := range p.deliver {
		skip := uint8(len(p.code) - i - 1)
		switch jump := p.code[i].(type) {
		case bpf.JumpIf:
			jump.SkipFalse = skip
			p.code[i] = jump
		case bpf.JumpIfX:
			jump.SkipFalse = skip
			p.code[i] = jump
		}
	}
	p.add(bpf.RetConstant{Val: ^uint32(0)})
	return bpf.Assemble(p.code)
}

// dropClosed drops TCP connections that were answered from a port and are in one of
// the states from TIME_WAIT on, see [Flow.CutShort]. Only those of TCP have a state
// there.
func (p *program) dropClosed(port uint16) {
	var state program // of a connection that was answered from there
	state.add(bpf.LoadConstant{Dst: bpf.RegA, Val: attributesBegin})
	state.find(bpf.ExtNetlinkAttr, ctaProtoInfo)
	state.find(bpf.ExtNetlinkAttrNested, ctaProtoInfoTCP)
	state.find(bpf.ExtNetlinkAttrNested, ctaProtoInfoTCPState)
	state.add(bpf.TAX{}, bpf.LoadIndirect{Off: unix.SizeofNlAttr, Size: 1})
	state.unless(bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: tcpTimeWait})
	state.add(bpf.RetConstant{Val: 0})
	p.nested(wordReply, ctaTupleProto, ctaProtoSrcPort, wordSrc)
	p.add(bpf.LoadScratch{Dst: bpf.RegX, N: wordSrc}, bpf.LoadIndirect{Off: unix.SizeofNlAttr, Size: 2})
	p.add(bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(port), SkipFalse: uint8(len(state.code))})
	p.append(&state)
}

func (p *program) add(code ...bpf.Instruction) { p.code = append(p.code, code...) }

// unless goes on where a comparison holds, and else to the end.
func (p *program) unless(comparison bpf.Instruction) {
	p.deliver = append(p.deliver, len(p.code))
	p.add(comparison)
}

func (p *program) append(q *program) {
	for _, i := range q.deliver {
		p.deliver = append(p.deliver, len(p.code)+i)
	}
	p.add(q.code...)
}

// find looks for an attribute from A on, or in the one that A is.
func (p *program) find(where bpf.Extension, kind uint32) {
	p.add(bpf.LoadConstant{Dst: bpf.RegX, Val: kind}, bpf.LoadExtension{Num: where})
	p.unless(bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: 1})
}

// nested keeps where the attribute is that lies two levels deep in a tuple.
func (p *program) nested(tuple int, outer, inner uint32, word int) {
	p.add(bpf.LoadScratch{Dst: bpf.RegA, N: tuple})
	p.find(bpf.ExtNetlinkAttrNested, outer)
	p.find(bpf.ExtNetlinkAttrNested, inner)
	p.add(bpf.StoreScratch{Src: bpf.RegA, N: word})
}

// sameAddress goes on where the answers come from the destination.
func (p *program) sameAddress(dst, src uint32, words int) {
	p.nested(wordOrig, ctaTupleIP, dst, wordDst)
	p.nested(wordReply, ctaTupleIP, src, wordSrc)
	for i := range words {
		p.same(4, uint32(4*i))
	}
}

// same goes on where both attributes have the same at an offset.
func (p *program) same(size int, offset uint32) {
	load := bpf.LoadIndirect{Off: unix.SizeofNlAttr + offset, Size: size}
	p.add(bpf.LoadScratch{Dst: bpf.RegX, N: wordDst}, load, bpf.StoreScratch{Src: bpf.RegA, N: wordValue},
		bpf.LoadScratch{Dst: bpf.RegX, N: wordSrc}, load, bpf.LoadScratch{Dst: bpf.RegX, N: wordValue})
	p.unless(bpf.JumpIfX{Cond: bpf.JumpEqual})
}
