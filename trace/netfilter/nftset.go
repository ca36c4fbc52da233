package netfilter

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// String prints a value for people.
func (v value) String() string {
	switch v.kind {
	case kindAddress:
		return v.address.String()
	case kindNumber:
		return strconv.FormatUint(v.number, 10)
	case kindTuple:
		var parts []string
		for _, p := range v.parts {
			parts = append(parts, p.String())
		}
		return strings.Join(parts, " . ")
	}
	return strings.Join(v.names, ",")
}

// elementsOf are the elements of a set or map, given by name or in place.
func elementsOf(data any, set *ruleset) ([]any, bool) {
	if name, ok := data.(string); ok && strings.HasPrefix(name, "@") {
		elements, ok := set.sets[name[1:]]
		return elements, ok
	}
	m, _ := data.(map[string]any)
	list, ok := m["set"]
	if !ok {
		return nil, false
	}
	return flat(list), true
}

// in reports whether a value is what an expression of constants says: one, a
// network, a range, or one of several.
func (v value) in(want any, set *ruleset) Answer {
	if elements, ok := elementsOf(want, set); ok {
		return v.among(elements, set)
	}
	switch x := want.(type) {
	case string:
		if strings.HasPrefix(x, "@") {
			return Maybe // a set that isn't there
		}
		if x == "*" {
			return Yes // for whatever isn't in the set by itself
		}
		return v.equals(x)
	case json.Number:
		return v.equals(x.String())
	case bool:
		return v.equals(strconv.FormatBool(x))
	case []any: // flags, of which one is enough
		return v.among(x, set)
	case map[string]any:
		for kind, detail := range x {
			return v.inObject(kind, detail, set)
		}
	}
	return Maybe
}

// exactly reports whether flags are those that are wanted, and no others.
func (v value) exactly(want any) Answer {
	if v.more {
		return Maybe
	}
	var names []string
	for _, e := range flat(want) {
		switch name := fmt.Sprint(e); {
		case strings.HasPrefix(name, "@"), strings.HasPrefix(name, "map["):
			return Maybe
		case name != "0":
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return answer(slices.Equal(slices.Compact(names), slices.Sorted(slices.Values(v.names))))
}

func (v value) among(elements []any, set *ruleset) Answer {
	out := No
	for _, e := range elements {
		switch v.in(e, set) {
		case Yes:
			return Yes
		case Maybe:
			out = Maybe
		}
	}
	return out
}

func (v value) inObject(kind string, detail any, set *ruleset) Answer {
	d, _ := detail.(map[string]any)
	list, _ := detail.([]any)
	switch kind {
	case "elem":
		return v.in(d["val"], set)
	case "prefix":
		a, err := netip.ParseAddr(fmt.Sprint(d["addr"]))
		bits, err2 := strconv.Atoi(fmt.Sprint(d["len"]))
		if err != nil || err2 != nil || v.kind != kindAddress {
			return Maybe
		}
		p, err := a.Prefix(bits)
		if err != nil {
			return Maybe
		}
		return answer(p.Contains(v.address))
	case "range":
		if len(list) == 2 {
			return v.between(fmt.Sprint(list[0]), fmt.Sprint(list[1]))
		}
	case "concat":
		return v.inTuple(list, set)
	case "|":
		return v.among(list, set)
	}
	return Maybe
}

func (v value) inTuple(list []any, set *ruleset) Answer {
	if v.kind != kindTuple || len(list) != len(v.parts) {
		return Maybe
	}
	out := Yes
	for i, e := range list {
		switch v.parts[i].in(e, set) {
		case No:
			return No
		case Maybe:
			out = Maybe
		}
	}
	return out
}

func (v value) between(first, last string) Answer {
	switch v.kind {
	case kindNumber:
		lo, err := strconv.ParseUint(first, 10, 64)
		hi, err2 := strconv.ParseUint(last, 10, 64)
		if err == nil && err2 == nil {
			return answer(lo <= v.number && v.number <= hi)
		}
	case kindAddress:
		lo, err := netip.ParseAddr(first)
		hi, err2 := netip.ParseAddr(last)
		if err == nil && err2 == nil {
			return answer(lo.BitLen() == v.address.BitLen() && lo.Compare(v.address) <= 0 && v.address.Compare(hi) <= 0)
		}
	}
	return Maybe
}

// equals compares with a constant as nft prints it: a protocol by name, an
// interface with a final "*" for the rest.
func (v value) equals(want string) Answer {
	switch v.kind {
	case kindNumber:
		n, err := strconv.ParseUint(want, 0, 64)
		if err != nil {
			return Maybe
		}
		return answer(n == v.number)
	case kindAddress:
		a, err := netip.ParseAddr(want)
		if err != nil {
			return Maybe
		}
		return answer(a == v.address)
	case kindNames:
		return answer(slices.Contains(v.names, want))
	case kindName:
		if prefix, wild := strings.CutSuffix(want, "*"); wild {
			return answer(strings.HasPrefix(v.names[0], prefix))
		}
		if n, known := protocolNumbers[v.names[0]]; known && want == strconv.Itoa(n) {
			return Yes
		}
		return answer(v.names[0] == want)
	}
	return Maybe
}

func answer(yes bool) Answer {
	if yes {
		return Yes
	}
	return No
}
