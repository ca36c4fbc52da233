package terminal

import (
	"unicode/utf8"

	"kproxy.dev/kproxy/view"
)

// keySuspend is Ctrl-Z, which raw mode leaves to the program.
const keySuspend view.Key = "ctrl-z"

// controls are the keys that send one control character.
var controls = map[byte]view.Key{
	0x03: view.KeyInterrupt, 0x1a: keySuspend, 0x15: view.KeyErase,
	'\r': view.KeyEnter, '\n': view.KeyEnter, 0x7f: view.KeyBackspace, 0x08: view.KeyBackspace,
	0x06: view.KeyPageDown, 0x02: view.KeyPageUp, // Ctrl-F and Ctrl-B, as in less
}

// sequences are what keys send after ESC [ or ESC O (xterm's ctlseqs, "PC-Style
// Function Keys"; the numbers are those of the VT220).
var sequences = map[string]view.Key{
	"A": view.KeyUp, "B": view.KeyDown, "H": view.KeyHome, "F": view.KeyEnd,
	"5~": view.KeyPageUp, "6~": view.KeyPageDown, "1~": view.KeyHome, "7~": view.KeyHome, "4~": view.KeyEnd, "8~": view.KeyEnd,
}

// parseKey takes the first key of b, which is n bytes long; n is 0 when b may
// be the start of more, unless it is all that there is. A key without a meaning
// here is "".
func parseKey(b []byte, all bool) (k view.Key, n int) {
	if b[0] == 0x1b {
		return parseEscape(b, all)
	}
	if k, ok := controls[b[0]]; ok {
		return k, 1
	}
	if b[0] < 0x20 {
		return "", 1
	}
	if !utf8.FullRune(b) && !all {
		return "", 0
	}
	r, n := utf8.DecodeRune(b)
	if r == utf8.RuneError {
		return "", n
	}
	return view.Key(r), n
}

// parseEscape reads a control sequence: parameters, then a final character
// (ECMA-48, 5.4).
func parseEscape(b []byte, all bool) (view.Key, int) {
	if len(b) == 1 {
		if all {
			return view.KeyEscape, 1
		}
		return "", 0
	}
	if b[1] != '[' && b[1] != 'O' {
		return view.KeyEscape, 1
	}
	for i := 2; i < len(b); i++ {
		if b[i] >= 0x40 && b[i] <= 0x7e {
			return sequences[string(b[2:i+1])], i + 1
		}
		if b[i] < 0x20 {
			return "", i
		}
	}
	if all {
		return "", len(b)
	}
	return "", 0
}
