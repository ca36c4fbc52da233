package config

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"
)

// part is a field of a Config that no further fields are in.
type part struct {
	name  string // in JSON: "ipvs.strictARP"
	flag  string // that sets it; empty if none does
	index []int  // for reflect's FieldByIndex
}

// parts takes a Config apart, once. It reads the fields themselves and not a Config as JSON, which
// can't hold every number: nothing here can fail.
var parts = sync.OnceValue(func() []part { return partsOf(reflect.TypeFor[Config](), part{}) })

func partsOf(t reflect.Type, in part) []part {
	var out []part
	for f := range t.Fields() {
		p := part{in.name + f.Tag.Get("json"), f.Tag.Get("flag"), append(slices.Clone(in.index), f.Index...)}
		if f.Type.Kind() == reflect.Struct {
			p.name += "."
			out = append(out, partsOf(f.Type, p)...)
		} else {
			out = append(out, p)
		}
	}
	return out
}

// FlagOf returns the flag of `kproxy run` that sets a part.
func FlagOf(name string) string {
	for _, p := range parts() {
		if p.name == name {
			return p.flag
		}
	}
	return ""
}

// SetBy returns a pointer to the part of c that a flag sets; nil if there is none.
func (c *Config) SetBy(flag string) any {
	for _, p := range parts() {
		if p.flag == flag {
			return reflect.ValueOf(c).Elem().FieldByIndex(p.index).Addr().Interface()
		}
	}
	return nil
}

// texts returns the values of all parts as their flags would take them.
func (c Config) texts() map[string]string {
	out := map[string]string{}
	values := reflect.ValueOf(c)
	for _, p := range parts() {
		v := reflect.Indirect(values.FieldByIndex(p.index))
		switch {
		case !v.IsValid(): // a nil pointer
			out[p.name] = ""
		case v.Kind() == reflect.Slice:
			out[p.name] = strings.Join(v.Interface().([]string), ",")
		default:
			out[p.name] = fmt.Sprint(v.Interface())
		}
	}
	return out
}

// MarshalJSON returns what /configz shows, with durations as people write them: "1m30s".
func (c Config) MarshalJSON() ([]byte, error) { return json.Marshal(readable(reflect.ValueOf(c))) }

func readable(v reflect.Value) any {
	if d, ok := v.Interface().(time.Duration); ok {
		return d.String()
	}
	if v.Kind() != reflect.Struct {
		return v.Interface()
	}
	out := map[string]any{}
	for f, v := range v.Fields() {
		out[f.Tag.Get("json")] = readable(v)
	}
	return out
}
