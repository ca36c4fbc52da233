package service

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"
)

// fields calls change with every field of the struct at v in turn, those of
// embedded and nested structs included, and its path.
func fields(v reflect.Value, path string, change func(path string, field reflect.Value)) {
	for i := range v.NumField() {
		f, name := v.Field(i), v.Type().Field(i).Name
		if f.Kind() == reflect.Struct && f.CanSet() && f.NumField() > 0 && f.Type().PkgPath() == v.Type().PkgPath() {
			fields(f, path+name+".", change)
			continue
		}
		change(path+name, f)
	}
}

// other sets a field to a value that isn't its zero value.
func other(t *testing.T, f reflect.Value) {
	t.Helper()
	switch v := f.Addr().Interface().(type) {
	case *time.Time:
		*v = time.Unix(1700000000, 1)
	case *[]netip.Addr:
		*v = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	case *[]netip.Prefix:
		*v = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	case *[]string:
		*v = []string{"x"}
	case *netip.AddrPort:
		*v = netip.MustParseAddrPort("10.0.0.1:80")
	default:
		switch f.Kind() {
		case reflect.String:
			f.SetString("x")
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Int, reflect.Int64:
			f.SetInt(7)
		case reflect.Uint8, reflect.Uint16:
			f.SetUint(7)
		default:
			t.Fatalf("no other value for a %s: extend this test", f.Type())
		}
	}
}

// A field that the hash leaves out would be a change that nobody notices.
func TestHashCoversEveryField(t *testing.T) {
	seen := map[uint64]string{}
	check := func(path string, hash uint64) {
		if first, dup := seen[hash]; dup {
			t.Errorf("%s and %s give the same hash", path, first)
		}
		seen[hash] = path
	}
	build := func(p Port, e Endpoint, n Node) uint64 {
		var b Builder
		b.SetNode(n)
		if err := b.AddPort(p); err != nil {
			t.Fatal(err)
		}
		b.AddEndpoint(p.Key, e)
		return b.Build().Hash()
	}
	base := build(Port{}, Endpoint{}, Node{})
	check("nothing", base)
	var p Port
	fields(reflect.ValueOf(&p).Elem(), "Port.", func(path string, f reflect.Value) {
		other(t, f)
		hash := build(p, Endpoint{}, Node{})
		f.SetZero()
		if path == "Port.Source" {
			if hash != base {
				t.Error("Port.Source is in the hash, and would be a change of a manifest that moved by a line")
			}
			return
		}
		check(path, hash)
	})
	e := Endpoint{Hints: &Hints{}}
	fields(reflect.ValueOf(e.Hints).Elem(), "Endpoint.Hints.", func(path string, f reflect.Value) {
		other(t, f)
		check(path, build(Port{}, e, Node{}))
		f.SetZero()
	})
	e = Endpoint{}
	fields(reflect.ValueOf(&e).Elem(), "Endpoint.", func(path string, f reflect.Value) {
		if path == "Endpoint.Hints" {
			return // see above
		}
		other(t, f)
		check(path, build(Port{}, e, Node{}))
		f.SetZero()
	})
	var n Node
	fields(reflect.ValueOf(&n).Elem(), "Node.", func(path string, f reflect.Value) {
		other(t, f)
		check(path, build(Port{}, Endpoint{}, n))
		f.SetZero()
	})
}

// Lists and strings that concatenate to the same text are different.
func TestHashKeepsFieldsApart(t *testing.T) {
	seen := map[uint64]string{}
	for _, p := range []Port{
		{Key: Key{Namespace: "ab", Name: "c"}},
		{Key: Key{Namespace: "a", Name: "bc"}},
		{Key: Key{Namespace: "a", Name: "b", Port: "c"}},
		{Problems: []string{"a", "b"}},
		{Problems: []string{"ab"}},
		{Problems: []string{"a b"}},
		{ClusterIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
		{ExternalIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
		{ClusterIPs: []netip.Addr{netip.MustParseAddr("::ffff:10.0.0.1")}},
	} {
		h := newEntry(&p, nil).hash
		if first, dup := seen[h]; dup {
			t.Errorf("%+v has the hash of %s", p, first)
		}
		seen[h] = fmt.Sprintf("%+v", p)
	}
}

// The same instant is the same content, wherever the clock that told it is.
func TestHashIgnoresLocationOfTime(t *testing.T) {
	now := time.Now()
	a, b := Port{Created: now}, Port{Created: now.Round(0).In(time.FixedZone("x", 3600))}
	if newEntry(&a, nil).hash != newEntry(&b, nil).hash {
		t.Error("one instant in two locations gives two hashes")
	}
}
