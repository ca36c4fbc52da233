package config

import (
	"cmp"
	"fmt"
	"slices"
)

// Outcome says what came of one field that a file has.
type Outcome struct {
	Field
	Line  int
	Value string // in the file, as JSON
	// Effect is the part of the Config that came of it, as text. It needn't be
	// Value: an empty one stands for the default.
	Effect string
	// Instead says why a field that isn't ignored has no effect here.
	Instead string
}

// Asks reports whether the field asks for anything. Files that programs write
// have every field, with an empty value for most.
func (o Outcome) Asks() bool {
	return !slices.Contains([]string{"null", `""`, "0", `"0"`, `"0s"`, "false", "[]", "{}"}, o.Value)
}

// String returns "mode: "ipvs": --mode=ipvs", or why there is no effect.
func (o Outcome) String() string {
	what := o.Path + ": " + o.Value + ": "
	switch {
	case !o.Asks() && o.Effect == "":
		return what + "asks for nothing"
	case o.Ignored != "":
		return what + "ignored: " + o.Ignored
	case o.Instead != "":
		return what + "ignored: " + o.Instead
	case o.Effect == "":
		return what + "leaves --" + o.Flag() + " empty"
	}
	return what + "--" + o.Flag() + "=" + o.Effect
}

// Outcomes says of every field that the file has, in the order of its lines,
// what came of it in c. isGiven says which flags are on the command line.
func (f *File) Outcomes(c Config, isGiven func(flag string) bool) []Outcome {
	out := slices.Clone(f.former)
	values := c.texts()
	for _, field := range fields {
		v := f.node.At(field.Path)
		if v == nil {
			continue
		}
		o := Outcome{Field: field, Line: f.node.Locate(field.Path), Value: v.String()}
		switch {
		case field.Ignored != "":
		case !f.isIn(field):
			o.Instead = fmt.Sprintf("mode is %q", f.kubeProxy.Mode)
		case field.Flag() == "kubeconfig" && isGiven("manifests"):
			o.Instead = "--manifests is given"
		case isGiven(field.Flag()):
			o.Instead = "--" + field.Flag() + " is given"
		default:
			if o.Instead = c.Idle(field.Flag()); o.Instead == "" {
				o.Effect = values[field.Sets]
			}
		}
		out = append(out, o)
	}
	slices.SortStableFunc(out, func(a, b Outcome) int { return cmp.Compare(a.Line, b.Line) })
	return out
}

// Idle says why the part of c that a flag sets has no effect beside the others; empty if it may have one.
func (c Config) Idle(flag string) string {
	ipvs, detectors := []string{"ipvs", "auto"}, DetectLocalModes
	needs := map[string]struct{ mode, detector []string }{
		"ipvs-scheduler": {ipvs, nil}, "ipvs-strict-arp": {ipvs, nil}, "ipvs-tcp-timeout": {ipvs, nil}, "ipvs-tcpfin-timeout": {ipvs, nil}, "ipvs-udp-timeout": {ipvs, nil},
		"nftables-flowtable": {[]string{"nftables", "auto"}, nil},
		"cluster-cidr":       {nil, detectors[:1]}, "pod-bridge-interface": {nil, detectors[2:3]}, "pod-interface-name-prefix": {nil, detectors[3:]},
	}[flag]
	detector := cmp.Or(c.DetectLocalMode, detectors[0])
	switch {
	case needs.mode != nil && !slices.Contains(needs.mode, c.Mode):
		return fmt.Sprintf("mode is %q", c.Mode)
	case needs.detector != nil && !slices.Contains(needs.detector, detector):
		return "pods are told by " + detector
	}
	return ""
}

// Change is a part of a Config that differs between two.
type Change struct {
	Part     string // its names in JSON
	From, To string
	Live     bool // a running kproxy takes it over without a restart
}

// String returns "mode from iptables to ipvs".
func (c Change) String() string { return fmt.Sprintf("%s from %q to %q", c.Part, c.From, c.To) }

// live are the parts that a running kproxy takes over: none of them concerns
// what is programmed or which connections go where.
var live = []string{"v", "enableProfiling", "oomScoreAdj"}

// Changes returns what differs from c to next, by name.
func (c Config) Changes(next Config) []Change {
	before, after := c.texts(), next.texts()
	var out []Change
	for part, to := range after {
		if from := before[part]; from != to {
			out = append(out, Change{part, from, to, slices.Contains(live, part)})
		}
	}
	slices.SortFunc(out, func(a, b Change) int { return cmp.Compare(a.Part, b.Part) })
	return out
}
