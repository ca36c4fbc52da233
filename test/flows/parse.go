package flows

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/tools/txtar"

	"kproxy.dev/kproxy/lab"
)

// Parse reads a matrix and reports everything that is wrong with it.
func Parse(data []byte) (*Matrix, error) {
	archive := txtar.Parse(data)
	p := &parser{m: &Matrix{}}
	sections := map[string]func([]string){
		"configurations": p.configuration, "hosts": p.host, "endpoints": p.endpoints, "services": p.service, "flows": p.row, "nowhere": p.nowhere,
	}
	for _, f := range archive.Files {
		parse := sections[f.Name]
		if parse == nil {
			p.fail("section %q isn't known", f.Name)
			continue
		}
		p.section, p.line = f.Name, 0
		for line := range strings.Lines(string(f.Data)) {
			p.line++
			if fields := strings.Fields(line); len(fields) > 0 && fields[0][0] != '#' {
				parse(fields)
			}
		}
	}
	return p.m, errors.Join(p.errs...)
}

type parser struct {
	m       *Matrix
	section string
	line    int // within the section
	errs    []error
}

func (p *parser) fail(format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("%s, line %d: %w", p.section, p.line, fmt.Errorf(format, args...)))
}

// columns reports whether there are as many as there have to be.
func (p *parser) columns(fields []string, want int) bool {
	if len(fields) != want {
		p.fail("%d columns, want %d", len(fields), want)
	}
	return len(fields) == want
}

// oneOf returns what a word names, and complains of one that names none of all.
func oneOf[T ~string](p *parser, word, complaint string, all ...T) T {
	if !slices.Contains(all, T(word)) {
		p.fail(complaint, word)
	}
	return T(word)
}

func (p *parser) configuration(fields []string) {
	if !p.columns(fields, 6) {
		return
	}
	c := Configuration{
		Name:          fields[0],
		Topology:      oneOf(p, fields[1], "topology %q isn't known", lab.Topologies...),
		Detector:      oneOf(p, fields[2], "detector %q isn't known", detectors...),
		MasqueradeAll: oneOf(p, fields[3], "masquerade-all is %q, want yes or no", "yes", "no") == "yes",
		OwnNodePorts:  oneOf(p, fields[4], "node-ports is %q, want all or own", "all", "own") == "own",
	}
	if fields[5] != "-" {
		for name := range strings.SplitSeq(fields[5], ",") {
			c.Hosts = append(c.Hosts, p.knownHost(name))
		}
	}
	p.m.Configurations = append(p.m.Configurations, c)
}

func (p *parser) host(fields []string) {
	if p.columns(fields, 1) {
		p.m.Hosts = append(p.m.Hosts, p.knownHost(fields[0]))
	}
}

func (p *parser) knownHost(name string) Host {
	return oneOf(p, name, "host %q isn't known", knownHosts...)
}

func (p *parser) endpoints(fields []string) {
	parts := strings.Split(strings.Join(fields, " "), " | ")
	conditions := strings.Fields(parts[0])
	if len(parts) != 3 || len(conditions) != 1+len(EndpointNames) {
		p.fail("want a name, a condition of each of %v, and what follows for Cluster and Local", EndpointNames)
		return
	}
	s := EndpointSet{Name: conditions[0], Conditions: map[string]Condition{}}
	for i, word := range conditions[1:] {
		if word != "-" {
			s.Conditions[EndpointNames[i]] = p.condition(word)
		}
	}
	s.Cluster, s.Local = p.outcome(parts[1], &s), p.outcome(parts[2], &s)
	p.m.EndpointSets = append(p.m.EndpointSets, s)
}

func (p *parser) condition(word string) Condition {
	word, hint, _ := strings.Cut(word, ":")
	switch word {
	case "ready":
		return Condition{Ready: true, Serving: true}
	case "leaving":
		return Condition{Serving: true, Terminating: true}
	case "gone":
		return Condition{Terminating: true}
	case "starting":
		return Condition{}
	case "unready":
		return Condition{Serving: true}
	case "zone":
		return Condition{Ready: true, Serving: true, Zone: hint}
	case "node":
		return Condition{Ready: true, Serving: true, Node: hint}
	}
	p.fail("condition %q isn't known", word)
	return Condition{}
}

func (p *parser) outcome(words string, s *EndpointSet) Outcome {
	if v := Verdict(words); v == Refuse || v == Drop {
		return Outcome{Verdict: v}
	}
	o := Outcome{Verdict: Serve, Endpoints: strings.Fields(words)}
	for _, name := range o.Endpoints {
		if _, ok := s.Conditions[name]; !ok {
			p.fail("%s serves, but doesn't exist", name)
		}
	}
	return o
}

func (p *parser) service(fields []string) {
	if !p.columns(fields, 7) {
		return
	}
	s := Service{
		Number: len(p.m.Services) + 1, Name: fields[0], Internal: p.policy(fields[1]), External: p.policy(fields[2]),
		Admits: oneOf(p, fields[4], "nobody is called %q", "everyone", "outside", "pods", "node"), configurations: p.configurations(fields[6]),
	}
	if fields[5] != "-" {
		s.Special = oneOf(p, fields[5], "nothing special is called %q", specials...)
	}
	for i := range p.m.EndpointSets {
		if p.m.EndpointSets[i].Name == fields[3] {
			s.Endpoints = &p.m.EndpointSets[i]
		}
	}
	if s.Endpoints == nil {
		p.fail("endpoints %q aren't in their table", fields[3])
	}
	p.m.Services = append(p.m.Services, s)
}

func (p *parser) policy(word string) Policy {
	return oneOf(p, word, "policy %q is neither Cluster nor Local", Cluster, Local)
}

func (p *parser) configurations(word string) []string {
	out := strings.Split(word, ",")
	for _, name := range out {
		if name != "*" && !slices.ContainsFunc(p.m.Configurations, func(c Configuration) bool { return c.Name == name }) {
			p.fail("configuration %q isn't in its table", name)
		}
	}
	return out
}

func (p *parser) row(fields []string) {
	if !p.columns(fields, 3+len(Froms)) {
		return
	}
	r := Row{Line: p.line, To: fields[0], Policy: p.policy(fields[1]), configurations: p.configurations(fields[2]), Cells: map[From]Cell{}}
	if !slices.Contains(Kinds, Kind(r.To)) && r.To != external && !strings.HasPrefix(r.To, admits) {
		p.fail("nothing is called %q", r.To)
	}
	for i, from := range Froms {
		r.Cells[from] = p.cell(fields[3+i])
	}
	p.m.Rows = append(p.m.Rows, r)
}

func (p *parser) nowhere(fields []string) {
	if !p.columns(fields, 2) {
		return
	}
	p.m.Nowhere = append(p.m.Nowhere, Nowhere{
		Line: p.line,
		To:   oneOf(p, fields[0], "nothing is called %q", otherPort, noService),
		Want: oneOf(p, fields[1], "%q is neither refuse nor drop", Refuse, Drop),
	})
}

func (p *parser) cell(word string) Cell {
	switch word {
	case "-":
		return Cell{}
	case "drop":
		return Cell{Exists: true, Drop: true}
	}
	policy, source, _ := strings.Cut(word, "/")
	c := Cell{Exists: true, Policy: map[string]Policy{"cluster": Cluster, "local": Local}[policy], Source: Source(source)}
	if c.Policy == "" || c.Source != AsClient && c.Source != AsNode {
		p.fail("cell %q is neither -, drop nor such as cluster/client", word)
	}
	return c
}
