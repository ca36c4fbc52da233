package userspace

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// pieceOf makes a piece of n bytes, a train where segment isn't 0.
func pieceOf(n, segment int) piece { return piece{data: make([]byte, n), segment: segment} }

func TestCoupled(t *testing.T) {
	repeat := func(n int, p piece) (out []piece) {
		for range n {
			out = append(out, p)
		}
		return out
	}
	tests := []struct {
		name       string
		in         []piece
		n, segment int
	}{
		{"one datagram", []piece{pieceOf(100, 0)}, 1, 0},
		{"one without bytes", []piece{pieceOf(0, 0), pieceOf(0, 0)}, 1, 0},
		{"nothing goes behind one without bytes", []piece{pieceOf(0, 0), pieceOf(5, 0)}, 1, 0},
		{"one without bytes goes behind none", []piece{pieceOf(5, 0), pieceOf(0, 0), pieceOf(5, 0)}, 1, 0},
		{"equal", []piece{pieceOf(5, 0), pieceOf(5, 0), pieceOf(5, 0)}, 3, 5},
		{"the last is shorter", []piece{pieceOf(5, 0), pieceOf(5, 0), pieceOf(3, 0), pieceOf(5, 0)}, 3, 5},
		{"the next is longer", []piece{pieceOf(5, 0), pieceOf(5, 0), pieceOf(6, 0)}, 2, 5},
		{"a train", []piece{pieceOf(23, 10)}, 1, 10},
		{"a train that is one datagram", []piece{pieceOf(10, 10)}, 1, 0},
		{"behind a short end", []piece{pieceOf(23, 10), pieceOf(10, 0)}, 1, 10},
		{"two trains", []piece{pieceOf(20, 10), pieceOf(25, 10), pieceOf(10, 0)}, 2, 10},
		{"two trains of different sizes", []piece{pieceOf(20, 10), pieceOf(20, 5)}, 1, 10},
		{"a datagram and a train", []piece{pieceOf(10, 0), pieceOf(25, 10)}, 2, 10},
		{"too many", repeat(70, pieceOf(5, 0)), maxSegments, 5},
		{"too many bytes", repeat(70, pieceOf(1400, 0)), maxTrain / 1400, 1400},
		{"the largest", repeat(3, pieceOf(65507, 0)), 1, 0},
	}
	for _, tt := range tests {
		if n, segment := coupled(tt.in); n != tt.n || segment != tt.segment {
			t.Errorf("%s: %d in segments of %d, want %d of %d", tt.name, n, segment, tt.n, tt.segment)
		}
	}
}

// Whatever is coupled, cut up again it is the same datagrams in the same order.
func FuzzCoupled(f *testing.F) {
	f.Add([]byte{5, 0, 5, 0, 3, 0, 0, 0, 5, 0})
	f.Add([]byte{23, 10, 10, 10, 20, 10, 7, 0})
	f.Add(bytes.Repeat([]byte{255, 0}, 100))
	f.Fuzz(func(t *testing.T, plan []byte) {
		var ps []piece
		var want [][]byte
		for i := 0; i+1 < len(plan); i += 2 {
			p := piece{data: bytes.Repeat([]byte{byte(i)}, int(plan[i])*7), segment: int(plan[i+1])}
			if p.segment >= len(p.data) {
				p.segment = 0
			}
			ps = append(ps, p)
			p.split(func(b []byte) { want = append(want, b) })
		}
		var got [][]byte
		for len(ps) > 0 {
			n, segment := coupled(ps)
			var all []byte
			count := 0
			for _, p := range ps[:n] {
				all = append(all, p.data...)
				count += p.datagrams()
			}
			if segment == 0 && n != 1 || n > 1 && (count > maxSegments || len(all) > maxTrain) {
				t.Fatalf("%d pieces of %d bytes are one train of segments of %d", n, len(all), segment)
			}
			piece{data: all, segment: segment}.split(func(b []byte) { got = append(got, b) })
			ps = ps[n:]
		}
		if diff := cmp.Diff(want, got, cmp.Comparer(bytes.Equal)); diff != "" {
			t.Error(diff)
		}
	})
}
