package handover

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// recorded has every message as commit 95e9e23 encodes it, with something in every field: a line each, its name and the bytes in
// hexadecimal. It is never written again: it says what kproxys that are out there send and read (docs/upgrades.md). Userspace is also
// what a stop leaves for the next start.
const recorded = "testdata/first.txt"

func everyMessage() map[string]Message {
	return map[string]Message{"Hello": new(Hello), "Welcome": new(Welcome), "Ask": new(Ask), "Paused": new(Paused), "Given": new(Given), "Userspace": new(Userspace)}
}

// fill puts something into every field.
func fill(v reflect.Value, n *int) {
	switch *n++; v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), n)
	case reflect.String:
		v.SetString(fmt.Sprint("text ", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n%200 + 1))
	case reflect.Int64:
		v.SetInt(int64(*n))
	default:
		panic("a field of kind " + v.Kind().String()) // which messages don't have
	}
}

// TestTakeoverFromTheFirst: every field of that commit's messages is understood as it was meant, and what it doesn't know of today's
// has other numbers. A change of a field that isn't a new number breaks this test, and takeovers between releases.
func TestTakeoverFromTheFirst(t *testing.T) {
	text, err := os.ReadFile(recorded)
	if err != nil {
		t.Fatal(err)
	}
	first := map[string][]byte{}
	for line := range strings.Lines(string(text)) {
		name, content, _ := strings.Cut(strings.TrimSpace(line), " ")
		if first[name], err = hex.DecodeString(content); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	for name, m := range everyMessage() {
		if err := Decode(first[name], m); err != nil {
			t.Errorf("what the first kproxy sends isn't read: %s: %v", name, err)
			continue
		}
		again, err := Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(plainly(t, first[name]), plainly(t, again)); diff != "" {
			t.Errorf("%s isn't understood as the first kproxy meant it (-it +now):\n%s", name, diff)
		}
		now, n := everyMessage()[name], 0
		fill(reflect.ValueOf(now).Elem(), &n)
		all, err := Encode(now)
		if err != nil {
			t.Fatal(err)
		}
		sameKinds(t, name, plainly(t, first[name]), plainly(t, all))
	}
	if len(first) != len(everyMessage()) {
		t.Errorf("%d messages are recorded, there are %d", len(first), len(everyMessage()))
	}
	if Version != 2 {
		t.Errorf("version %d can't be taken over from one of version 2, nor the other way round: docs/upgrades.md promises that for a minor release", Version)
	}
}

// plainly decodes a message without its type.
func plainly(t *testing.T, content []byte) any {
	t.Helper()
	var v any
	if err := Decode(bytes.Clone(content), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// sameKinds compares values that are to be read by one type: what both have is of one kind.
func sameKinds(t *testing.T, at string, first, now any) {
	t.Helper()
	if reflect.TypeOf(first) != reflect.TypeOf(now) {
		t.Errorf("%s was %T, now it is %T", at, first, now)
		return
	}
	switch first := first.(type) {
	case map[any]any:
		for number, v := range first {
			other, ok := now.(map[any]any)[number]
			if !ok {
				t.Errorf("%s has no field %v any more", at, number)
				continue
			}
			sameKinds(t, fmt.Sprintf("%s.%v", at, number), v, other)
		}
	case []any:
		sameKinds(t, at+"[0]", first[0], now.([]any)[0])
	}
}
