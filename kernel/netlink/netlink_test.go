package netlink

import (
	"bytes"
	"net/netip"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestAttributesRoundTrip(t *testing.T) {
	b := AppendText(nil, 1, "text")
	b = AppendNested(b, 2, func(b []byte) []byte {
		b = AppendAddr(b, 1, netip.MustParseAddr("10.0.0.1"))
		return AppendAddr(b, 2|NetByteOrder, netip.MustParseAddr("fd00::1"))
	})
	b = AppendUint32(AppendUint16(b, 3, 0x1234), 4, 0x12345678)
	type attribute struct {
		Type  uint16
		Value []byte
	}
	want := []attribute{
		{1, []byte("text\x00")}, {2, append([]byte{8, 0, 1, 0, 10, 0, 0, 1, 20, 0, 2, 0x40}, netip.MustParseAddr("fd00::1").AsSlice()...)},
		{3, []byte{0x12, 0x34}}, {4, []byte{0x12, 0x34, 0x56, 0x78}},
	}
	var got []attribute
	for typ, value := range Attributes(b) {
		got = append(got, attribute{typ, value})
	}
	if diff := cmp.Diff(want, got); diff != "" || Text(got[0].Value) != "text" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(b)%4 != 0 {
		t.Errorf("%d bytes aren't padded", len(b))
	}
}

// FuzzAttributes: any bytes are read to the first attribute that is cut short, and
// what was read is written the same again.
func FuzzAttributes(f *testing.F) {
	f.Add(AppendUint16(AppendText(nil, 1, "x"), 2|Nested, 7))
	f.Add([]byte{3, 0, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			typ, value, rest, ok := Next(b)
			if !ok {
				if len(b) >= 4 && len(rest) != len(b) {
					t.Fatalf("%x is cut short, and %x is left", b, rest)
				}
				return
			}
			if typ2, value2, _, ok := Next(Append(nil, typ, value...)); !ok || typ2 != typ || !bytes.Equal(value2, value) {
				t.Fatalf("%d %x comes back as %d %x", typ, value, typ2, value2)
			}
			b = rest
		}
	})
}

// FuzzMessages: whatever is read from a socket doesn't panic, and bodies lie in it.
func FuzzMessages(f *testing.F) {
	f.Add(AppendRequest(nil, 16, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		total := 0
		for m := range Messages(b) {
			total += unix.NLMSG_HDRLEN + len(m.Body)
		}
		if total > len(b) {
			t.Errorf("%d bytes of messages in %d", total, len(b))
		}
	})
}

// TestChange: requests go on after one that fails, also over several messages, and
// each has its own error.
func TestChange(t *testing.T) {
	runtime.LockOSThread() // for good: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Skipf("needs root: network namespaces: %v", err)
	}
	s, err := Open(unix.NETLINK_ROUTE, 4<<10)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	// Sets links by index to what they are; number 1 is lo, none has number 0.
	errs := s.Change(2*changesAtOnce+3, func(b []byte, i int) []byte {
		index := byte(1)
		if i%5 == 4 {
			index = 0
		}
		b = AppendRequest(b, unix.RTM_SETLINK, 0)
		return append(b, 0, 0, 0, 0, index, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	})
	for i, err := range errs {
		if failed := i%5 == 4; failed != (err != nil) {
			t.Errorf("request %d: %v", i, err)
		}
	}
	if len(errs) != 2*changesAtOnce+3 {
		t.Errorf("%d results", len(errs))
	}
}

// TestDumpAfterOverrun: a list is had from a socket that had no room for the list before.
func TestDumpAfterOverrun(t *testing.T) {
	s, err := Open(unix.NETLINK_ROUTE, 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_RCVBUF, 1); err != nil { // the least there is
		t.Fatal(err)
	}
	links := func(flags uint16) func(b []byte) []byte {
		return func(b []byte) []byte {
			b = AppendRequest(b, unix.RTM_GETLINK, flags)
			return append(b, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) // number 1 is lo
		}
	}
	for range 3 {
		_ = s.send(1, func(b []byte, _ int) []byte { return links(0)(b) })
		_ = s.send(1, func(b []byte, _ int) []byte { return links(unix.NLM_F_DUMP)(b) }) // refused (ENOBUFS), and goes on
	}
	n := 0
	if err := s.Dump(links(unix.NLM_F_DUMP), func([]byte) { n++ }); err != nil || n == 0 {
		t.Errorf("%d links, %v", n, err)
	}
}
