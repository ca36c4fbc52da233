package kernel_test

import (
	"testing"

	"kproxy.dev/kproxy/kernel"
)

func TestMarks(t *testing.T) {
	const markDrop = 0x8000 // KUBE-MARK-DROP
	m := kernel.DefaultMarks()
	if own := m.Own(); own != 0x1800 || own&(m.Masquerade|markDrop) != 0 {
		t.Errorf("own mark %#x, want 0x1800", own)
	}
}
