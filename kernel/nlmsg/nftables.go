package nlmsg

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// nftRoom holds every part of a list of nf_tables (NLMSG_GOODSIZE is 8 KiB at most; a
// longer message is made for one that doesn't fit).
const nftRoom = 64 << 10

// dumps is how often a list is asked for that changes interrupt.
const dumps = 5

// DumpNFTables lists the objects that an nf_tables message (unix.NFT_MSG_GETTABLE, …) asks
// for, of a family, or of all (unix.NFPROTO_UNSPEC), in the network namespace of the calling
// thread; which appends attributes that say of which table or set, nil for all. A kernel
// without nf_tables has none.
func DumpNFTables(message uint16, family uint8, which func([]byte) []byte, each func(family uint8, attributes []byte)) error {
	s, err := Open(unix.NETLINK_NETFILTER, nftRoom)
	if err != nil {
		return err
	}
	defer s.Close()
	var list [][]byte
	for range dumps {
		list = nil
		err = s.Dump(func(b []byte) []byte {
			b = AppendNetfilter(AppendRequest(b, unix.NFNL_SUBSYS_NFTABLES<<8|message, unix.NLM_F_DUMP), family)
			if which != nil {
				b = which(b)
			}
			return b
		}, func(body []byte) { list = append(list, bytes.Clone(body)) })
		if !errors.Is(err, ErrInterrupted) {
			break
		}
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	for _, body := range list {
		if len(body) >= SizeofNetfilter {
			each(body[0], body[SizeofNetfilter:])
		}
	}
	return err
}

// Requester has the method Do of a [Socket].
type Requester interface {
	Do(n int, request func(b []byte, i int) []byte, result func(i int, body []byte, err error)) error
}

// Generation is how many transactions nf_tables has carried out in the socket's network
// namespace, of all families together and whosever they were.
func Generation(s Requester) (out uint32, err error) {
	var failure error
	answered := false
	err = s.Do(1, func(b []byte, _ int) []byte {
		return AppendNetfilter(AppendRequest(b, unix.NFT_MSG_GETGEN|unix.NFNL_SUBSYS_NFTABLES<<8, 0), unix.AF_UNSPEC)
	}, func(_ int, body []byte, err error) {
		failure = err
		for typ, v := range Attributes(body[min(len(body), SizeofNetfilter):]) {
			if typ == unix.NFTA_GEN_ID && len(v) >= 4 {
				out, answered = binary.BigEndian.Uint32(v), true
			}
		}
	})
	if err = cmp.Or(err, failure); err == nil && !answered {
		err = ErrNoAnswer
	}
	return out, err
}

// Parts of sets that x/sys/unix doesn't have of linux/netfilter/nf_tables.h.
const (
	SetConcat     = 0x80 // NFT_SET_CONCAT
	SetDescConcat = 2    // NFTA_SET_DESC_CONCAT
	SetFieldLen   = 1    // NFTA_SET_FIELD_LEN
	SetElemKeyEnd = 10   // NFTA_SET_ELEM_KEY_END
)
