package statistics

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSpread(t *testing.T) {
	for _, tt := range []struct {
		name   string
		values []float64
		want   Spread
		text   string
	}{
		{"none", nil, Spread{}, "0"},
		{"one", []float64{3}, Spread{3, 3, 3}, "3.00"},
		{"odd", []float64{9, 1, 2}, Spread{2, 1, 9}, "2.00 (1.00–9.00)"},
		{"even", []float64{4, 1, 2, 30}, Spread{3, 1, 30}, "3.00 (1.00–30.0)"},
		{"same to the reader", []float64{1.0001, 1.0002}, Spread{1.00015, 1.0001, 1.0002}, "1.00"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Of(tt.values)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("spread (-want +got):\n%s", diff)
			}
			if got.String() != tt.text {
				t.Errorf("printed as %q, want %q", got, tt.text)
			}
		})
	}
}

func TestRatiosAreWithinARound(t *testing.T) {
	for _, tt := range []struct {
		name     string
		a, b     []float64
		want     []float64
		distinct bool
	}{
		{"always more, however the machine was", []float64{2, 20, 8}, []float64{1, 10, 4}, []float64{2, 2, 2}, true},
		{"always less", []float64{1, 10, 1}, []float64{2, 40, 2}, []float64{0.5, 0.25, 0.5}, true},
		{"once more, once less", []float64{2, 1, 2}, []float64{1, 2, 1}, []float64{2, 0.5, 2}, false},
		{"once the same", []float64{2, 1, 2}, []float64{1, 1, 1}, []float64{2, 1, 2}, false},
		{"two rounds prove nothing", []float64{9, 9}, []float64{1, 1}, []float64{9, 9}, false},
		{"nothing to divide by", []float64{9, 4}, []float64{0, 2}, []float64{2}, false},
		{"a round is missing", []float64{9, 4}, []float64{3}, []float64{3}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Ratios(tt.a, tt.b)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("ratios (-want +got):\n%s", diff)
			}
			if Distinct(got) != tt.distinct {
				t.Errorf("distinct is %v, want %v", Distinct(got), tt.distinct)
			}
		})
	}
}

func TestFigure(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.0123: "0.012", 1: "1.00", 9.876: "9.88", 12.34: "12.3", 123.4: "123", 1234.5: "1,235", 1234567: "1,234,567",
	} {
		if got := Figure(v); got != want {
			t.Errorf("Figure(%v) = %q, want %q", v, got, want)
		}
	}
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1234: "-1,234", -123: "-123"} {
		if got := Thousands(n); got != want {
			t.Errorf("Thousands(%d) = %q, want %q", n, got, want)
		}
	}
}
