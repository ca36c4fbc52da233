package conntrack

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

var comparer = cmpopts.EquateComparable(netip.AddrPort{})

// full is a message with every attribute that is decoded, and some that aren't.
func full(f service.Family) []byte {
	b := appendHeader(nil, f)
	b = appendTuple(b, ctaTupleOrig, service.TCP, at(f, clients, 9, 50000), at(f, services, 10, 53))
	b = appendTuple(b, ctaTupleReply, service.TCP, at(f, pods, 2, 5353), at(f, nodes, 1, 50001))
	b = nlmsg.Append(b, ctaStatus, 0, 0, 1, 0x8e)
	b = nlmsg.Append(b, ctaTimeout, 0, 0, 0, 120)
	b = nlmsg.Append(b, ctaMark, 0, 0, 0x40, 0)
	b = nlmsg.Append(b, ctaID, 0xde, 0xad, 0xbe, 0xef)
	b = nlmsg.Append(b, ctaZone, 0, 7)
	counters := func(packets, bytes uint64) func([]byte) []byte {
		return func(b []byte) []byte {
			b = nlmsg.Append(b, ctaCountersPackets, binary.BigEndian.AppendUint64(nil, packets)...)
			return nlmsg.Append(b, ctaCountersBytes, binary.BigEndian.AppendUint64(nil, bytes)...)
		}
	}
	b = nlmsg.AppendNested(b, ctaCountersOrig, counters(3, 300))
	b = nlmsg.AppendNested(b, ctaCountersReply, counters(2, 1<<40))
	b = nlmsg.AppendNested(b, ctaProtoInfo, func(b []byte) []byte {
		return nlmsg.AppendNested(b, ctaProtoInfoTCP, func(b []byte) []byte {
			return nlmsg.Append(b, ctaProtoInfoTCPState, tcpTimeWait)
		})
	})
	b = nlmsg.AppendNested(b, ctaTimestamp, func(b []byte) []byte {
		return nlmsg.Append(b, ctaTimestampStart, binary.BigEndian.AppendUint64(nil, uint64(1700000000*time.Second))...)
	})
	return nlmsg.Append(b, 999, 1, 2, 3)
}

func TestDecode(t *testing.T) {
	for _, f := range service.Families {
		got, err := decode(full(f))
		want := Flow{
			Family: f, Protocol: service.TCP,
			OrigSrc: at(f, clients, 9, 50000), OrigDst: at(f, services, 10, 53),
			ReplySrc: at(f, pods, 2, 5353), ReplyDst: at(f, nodes, 1, 50001),
			OrigPackets: 3, OrigBytes: 300, ReplyPackets: 2, ReplyBytes: 1 << 40,
			Mark: 0x4000, Status: 0x18e, Timeout: 2 * time.Minute, ID: 0xdeadbeef, Zone: 7,
			TCPState: tcpTimeWait, Start: time.Unix(1700000000, 0),
		}
		if diff := cmp.Diff(want, got, comparer); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", f, err, diff)
		}
		if got.Open() || !got.Rewritten() {
			t.Errorf("%s: open %v, rewritten %v; want a closed, rewritten flow", f, got.Open(), got.Rewritten())
		}
	}
}

// Cutting a message anywhere gives an error or a flow with fewer fields, and
// never another value in a field.
func TestDecodeCutShort(t *testing.T) {
	whole := full(service.IPv6)
	want, err := decode(whole)
	if err != nil {
		t.Fatal(err)
	}
	for n := range whole {
		got, err := decode(whole[:n])
		if err != nil {
			continue
		}
		if got.OrigSrc.IsValid() && got.OrigSrc != want.OrigSrc || got.ID != 0 && got.ID != want.ID || got.OrigBytes != 0 && got.OrigBytes != want.OrigBytes {
			t.Errorf("first %d bytes decode to %+v", n, got)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	cases := map[string]string{
		"nothing":               "",
		"family of a bridge":    "07000000",
		"attribute too long":    "02000000" + "ffff0300",
		"attribute too short":   "02000000" + "03000300",
		"IPv6 address in IPv4":  "02000000" + "1c000180" + "18000180" + "14000300" + "00000000000000000000000000000000",
		"status of two bytes":   "02000000" + "060003000000" + "0000",
		"counter of four bytes": "02000000" + "0c000980" + "0800010000000000",
	}
	for name, text := range cases {
		b, err := hex.DecodeString(text)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if f, err := decode(b); err == nil {
			t.Errorf("%s: decoded to %+v, want an error", name, f)
		}
	}
}

// getBody is a request without the header of netlink.
func getBody(p service.Protocol, src, dst netip.AddrPort) []byte {
	return appendGet(nil, p, src, dst)[unix.NLMSG_HDRLEN:]
}

func FuzzDecode(f *testing.F) {
	for _, family := range service.Families {
		f.Add(full(family))
		f.Add(getBody(service.UDP, at(family, 1, 1, 1), at(family, 2, 2, 2)))
		f.Add(appendDump(nil, family, wanted{protocol: service.UDP, unanswered: true})[unix.NLMSG_HDRLEN:])
		flow := flow(family, service.UDP, at(family, 1, 1, 1), at(family, 2, 2, 2))
		f.Add(appendDelete(nil, &flow)[unix.NLMSG_HDRLEN:])
	}
	f.Add([]byte{unix.AF_INET, 0, 0, 0, 4, 0, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		flow, err := decode(b)
		if err != nil {
			return
		}
		_ = flow.String()
		again, err := decode(b)
		if err != nil || again != flow {
			t.Errorf("decoded to %+v, then to %+v, %v", flow, again, err)
		}
		for _, a := range []struct{ bits int }{{flow.OrigSrc.Addr().BitLen()}, {flow.ReplySrc.Addr().BitLen()}} {
			if a.bits != 0 && a.bits != flow.Family.Bits() {
				t.Errorf("address of %d bits in a flow of %s", a.bits, flow.Family)
			}
		}
	})
}

func FuzzRoundTrip(f *testing.F) {
	f.Add(uint16(1), uint16(2), []byte("0123456789abcdef"))
	f.Fuzz(func(t *testing.T, srcPort, dstPort uint16, raw []byte) {
		if len(raw) < 2 {
			return
		}
		for _, family := range service.Families {
			src, dst := at(family, int(raw[0]), int(raw[1]), srcPort), at(family, int(raw[1]), int(raw[0]), dstPort)
			got, err := decode(getBody(service.SCTP, src, dst))
			if err != nil || got.ReplySrc != src || got.ReplyDst != dst || got.Protocol != service.SCTP || got.Family != family {
				t.Errorf("%s > %s came back as %+v, %v", src, dst, got, err)
			}
		}
	})
}
