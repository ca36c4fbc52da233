package kernel

import (
	"testing"

	"kproxy.dev/kproxy/kernel/netlink"
)

// FuzzEntry: whatever entry is taken is printed in a form that is taken, and
// that means the same; the kernel's decoder reads back what the encoder wrote.
func FuzzEntry(f *testing.F) {
	types := []SetType{HashIP, HashNet, HashIPPort, HashIPPortIP, HashIPPortNet, BitmapPort}
	for i, s := range []string{"10.0.0.1", "10.0.0.0/8", "fd00::1,tcp:80", "10.0.0.1,sctp:1,10.0.0.1", "fd00::1,udp:53,2001:db8::/32", "65535"} {
		f.Add(s, byte(i))
	}
	f.Fuzz(func(t *testing.T, s string, typ byte) {
		st := types[int(typ)%len(types)]
		e, err := ParseEntry(st, s)
		if err != nil {
			return
		}
		text := e.Text(st)
		again, err := ParseEntry(st, text)
		if err != nil || again != e {
			t.Errorf("%q is printed as %q and read as %+v, %v; want %+v", s, text, again, err, e)
		}
		e.Remaining = 7
		for _, v := range attributesOf(appendEntry(nil, &e, 7)) {
			if decoded := decodeEntry(v, -1); decoded != e {
				t.Errorf("%+v is decoded as %+v", e, decoded)
			}
		}
	})
}

func attributesOf(b []byte) (out [][]byte) {
	for _, v := range netlink.Attributes(b) {
		out = append(out, v)
	}
	return out
}

// FuzzDecode: nothing that may come over netlink makes the decoder panic.
func FuzzDecode(f *testing.F) {
	f.Add(appendEntry(nil, &AnyEntry{Port: 1}, 1))
	f.Fuzz(func(_ *testing.T, b []byte) {
		var s AnySet
		_ = s.decode(b)
	})
}
