package kernel_test

import (
	"testing"

	"kproxy.dev/kproxy/kernel"
)

func TestMarks(t *testing.T) {
	const markDrop = 0x8000 // KUBE-MARK-DROP
	m := kernel.DefaultMarks()
	if err := m.Validate(); err != nil {
		t.Error(err)
	}
	if own := m.Own(); own != 0x1800 || own&(m.Masquerade|markDrop) != 0 {
		t.Errorf("own mark %#x, want 0x1800", own)
	}
	tests := []struct {
		what  string
		marks kernel.Marks
		ok    bool
	}{
		{"neighbours", kernel.Marks{Masquerade: 0x4000, Transparent: 0x2000}, true},
		{"highest bit", kernel.Marks{Masquerade: 0x4000, Transparent: 1 << 31}, true},
		{"no bit below", kernel.Marks{Masquerade: 0x4000, Transparent: 1}, false},
		{"same bit", kernel.Marks{Masquerade: 0x4000, Transparent: 0x4000}, false},
		{"bit below is the masquerade bit", kernel.Marks{Masquerade: 0x4000, Transparent: 0x8000}, false},
		{"two bits", kernel.Marks{Masquerade: 0x4000, Transparent: 0x1800}, false},
		{"no bit", kernel.Marks{Masquerade: 0x4000}, false},
	}
	for _, tt := range tests {
		if err := tt.marks.Validate(); (err == nil) != tt.ok {
			t.Errorf("%s: Validate() = %v, want it valid: %t", tt.what, err, tt.ok)
		}
	}
}
