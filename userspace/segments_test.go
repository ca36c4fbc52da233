package userspace

import (
	"slices"
	"testing"
)

func TestSegments(t *testing.T) {
	tests := []struct {
		name  string
		sizes []int
		want  int
	}{
		{"one datagram", []int{100}, 1},
		{"one without bytes", []int{0, 0}, 1},
		{"nothing goes behind one without bytes", []int{0, 5}, 1},
		{"one without bytes goes behind none", []int{5, 0, 5}, 1},
		{"equal", []int{5, 5, 5}, 3},
		{"the last is shorter", []int{5, 5, 3, 5}, 3},
		{"the next is longer", []int{5, 5, 6}, 2},
		{"too many", slices.Repeat([]int{5}, 70), maxSegments},
		{"too many bytes", slices.Repeat([]int{1400}, 70), maxSegmented / 1400},
		{"the largest", slices.Repeat([]int{65507}, 3), 1},
	}
	for _, tt := range tests {
		var ds [][]byte
		for _, n := range tt.sizes {
			ds = append(ds, make([]byte, n))
		}
		if n := segments(ds); n != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, n, tt.want)
		}
	}
}

// Cut up again, segments are the same datagrams.
func FuzzSegments(f *testing.F) {
	f.Add([]byte{5, 5, 3, 0, 5})
	f.Add(slices.Repeat([]byte{255}, 100))
	f.Fuzz(func(t *testing.T, plan []byte) {
		var ds [][]byte
		for _, n := range plan {
			ds = append(ds, make([]byte, int(n)*7))
		}
		for len(ds) > 0 {
			n, total := segments(ds), 0
			for i, d := range ds[:n] {
				if total += len(d); i < n-1 && len(d) != len(ds[0]) || len(d) > len(ds[0]) || n > 1 && len(d) == 0 {
					t.Fatalf("datagram %d of %d has %d bytes, the first %d", i, n, len(d), len(ds[0]))
				}
			}
			if n > maxSegments || n > 1 && total > maxSegmented {
				t.Fatalf("%d datagrams of %d bytes are one message", n, total)
			}
			ds = ds[n:]
		}
	})
}
