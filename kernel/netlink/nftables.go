package netlink

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"slices"

	"golang.org/x/sys/unix"
)

// nftRoom holds every part of a list of nf_tables (NLMSG_GOODSIZE is 8 KiB at most; a
// longer message is made for one that doesn't fit).
const nftRoom = 64 << 10

// Dumper has the method Dump of a [Socket].
type Dumper interface {
	Dump(request func(b []byte) []byte, each func(body []byte)) error
}

// ListNFTables lists the objects that an nf_tables message (unix.NFT_MSG_GETTABLE, …) asks
// for, of a family, or of all (unix.NFPROTO_UNSPEC); which appends attributes that say of which
// table or set, nil for all. Each is called when the list is whole. One that others' transactions interrupt again
// and again is taken for whole when it is the same twice.
func ListNFTables(s Dumper, message uint16, family uint8, which func([]byte) []byte, each func(family uint8, attributes []byte)) error {
	const attempts = 20
	var last [][]byte
	for i := 0; ; i++ {
		var list [][]byte
		err := s.Dump(nftList(message, family, which), func(body []byte) {
			if len(body) >= SizeofNetfilter {
				list = append(list, bytes.Clone(body))
			}
		})
		if errors.Is(err, ErrInterrupted) {
			if i > 0 && slices.EqualFunc(list, last, bytes.Equal) {
				err = nil
			} else if i < attempts {
				last = list
				continue
			}
		}
		if err != nil {
			return err
		}
		for _, body := range list {
			each(body[0], body[SizeofNetfilter:])
		}
		return nil
	}
}

// nftList returns what appends the request for a list.
func nftList(message uint16, family uint8, which func([]byte) []byte) func([]byte) []byte {
	return func(b []byte) []byte {
		b = AppendNetfilter(AppendRequest(b, unix.NFNL_SUBSYS_NFTABLES<<8|message, unix.NLM_F_DUMP), family)
		if which != nil {
			b = which(b)
		}
		return b
	}
}

// SampleNFTables calls each with the attributes of one message after another of such a list until it returns false. Others may change the
// list meanwhile.
func SampleNFTables(message uint16, family uint8, which func([]byte) []byte, each func(attributes []byte) bool) error {
	s, err := Open(unix.NETLINK_NETFILTER, nftRoom)
	if err != nil {
		return err
	}
	defer s.Close()
	err = s.DumpWhile(nftList(message, family, which), func(body []byte) bool { return each(body[min(len(body), SizeofNetfilter):]) })
	if errors.Is(err, ErrInterrupted) {
		return nil
	}
	return err
}

// DumpNFTables is [ListNFTables] in the network namespace of the calling thread. A kernel
// without nf_tables has none.
func DumpNFTables(message uint16, family uint8, which func([]byte) []byte, each func(family uint8, attributes []byte)) error {
	s, err := Open(unix.NETLINK_NETFILTER, nftRoom)
	if err != nil {
		return err
	}
	defer s.Close()
	if err = ListNFTables(s, message, family, which, each); errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// Requester has the method Do of a [Socket].
type Requester interface {
	Do(n int, request func(b []byte, i int) []byte, result func(i int, body []byte, err error)) error
}

// Generation returns how many transactions nf_tables has carried out in the socket's network
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
