package kernel

import (
	"testing"

	"kproxy.dev/kproxy/kernel/nlmsg"
)

// FuzzElement: whatever entry is taken is printed in a form that is taken, and
// that means the same; the kernel's decoder reads back what the encoder wrote.
func FuzzElement(f *testing.F) {
	types := []SetType{HashIP, HashNet, HashIPPort, HashIPPortIP, HashIPPortNet, BitmapPort}
	for i, s := range []string{"10.0.0.1", "10.0.0.0/8", "fd00::1,tcp:80", "10.0.0.1,sctp:1,10.0.0.1", "fd00::1,udp:53,2001:db8::/32", "65535"} {
		f.Add(s, byte(i))
	}
	f.Fuzz(func(t *testing.T, s string, typ byte) {
		st := types[int(typ)%len(types)]
		e, err := parseElement(st, s)
		if err != nil {
			return
		}
		text := e.format(st)
		again, err := parseElement(st, text)
		if err != nil || again != e {
			t.Errorf("%q is printed as %q and read as %+v, %v; want %+v", s, text, again, err, e)
		}
		for _, v := range attributesOf(appendElement(nil, e, 7)) {
			decoded, timeout, timed := decodeElement(v)
			if decoded != e || timeout != 7 || !timed {
				t.Errorf("%+v is decoded as %+v, %d s", e, decoded, timeout)
			}
		}
	})
}

func attributesOf(b []byte) (out [][]byte) {
	for _, v := range nlmsg.Attributes(b) {
		out = append(out, v)
	}
	return out
}

// FuzzDecode: nothing that may come over netlink makes the decoder panic.
func FuzzDecode(f *testing.F) {
	f.Add(appendElement(nil, element{port: 1}, 1))
	f.Fuzz(func(_ *testing.T, b []byte) {
		var st SetState
		_ = st.decode(b)
	})
}
