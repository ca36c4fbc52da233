package netfilter

import (
	"testing"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
)

// TestRange: a value that lies within a range matches, or one that doesn't. nft writes the former
// as two comparisons; other programs don't.
func TestRange(t *testing.T) {
	for _, tt := range []struct {
		port byte
		op   byte
		want Answer
	}{
		{9, unix.NFT_RANGE_EQ, No}, {10, unix.NFT_RANGE_EQ, Yes}, {20, unix.NFT_RANGE_EQ, Yes}, {21, unix.NFT_RANGE_EQ, No},
		{9, unix.NFT_RANGE_NEQ, Yes}, {10, unix.NFT_RANGE_NEQ, No}, {20, unix.NFT_RANGE_NEQ, No}, {21, unix.NFT_RANGE_NEQ, Yes},
	} {
		data := func(v byte) []byte { return netlink.Append(nil, unix.NFTA_DATA_VALUE, 0, v) }
		run := (&nftDecoder{}).between(0, attributes{unix.NFTA_RANGE_OP: {tt.op}, unix.NFTA_RANGE_FROM_DATA: data(10), unix.NFTA_RANGE_TO_DATA: data(20)})
		s := &nftState{}
		s.set(0, []byte{0, tt.port}, []byte{0xff, 0xff})
		if got := run(nil, s, position{}).answer; got != tt.want {
			t.Errorf("%d, operation %d: %v, want %v", tt.port, tt.op, got, tt.want)
		}
	}
}
