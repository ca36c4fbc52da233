package trace

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"kproxy.dev/kproxy/plan"
)

// Look says how to print a Result.
type Look struct {
	Width  int // columns; 0 for 80
	Colour bool
}

// Text prints a Result for a person: the answer first, then the way there.
func (r *Result) Text(l Look) string {
	p := newPrinter(l)
	p.headline(r)
	if r.Namespace != "" {
		p.wrapped("Traced   ", "network namespace "+r.Namespace)
	}
	p.candidates(r)
	if r.Verdict != Leaves {
		p.wrapped("Source   ", r.sourceText())
	}
	p.findings(r)
	p.probe(r.Probe)
	p.path(r)
	return p.b.String()
}

// printer collects text of a limited width.
type printer struct {
	Look
	b strings.Builder
}

func newPrinter(l Look) *printer {
	if l.Width <= 0 {
		l.Width = 80
	}
	return &printer{Look: l}
}

// Colours (ECMA-48 SGR): of what is wrong, doubtful, right, and less important.
const (
	red    = "31;1"
	yellow = "33"
	green  = "32;1"
	faint  = "2"
	bold   = "1"
)

func (p *printer) coloured(text, colour string) string {
	if !p.Colour || colour == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// wrapped prints text behind a label, and goes on below the text's beginning.
func (p *printer) wrapped(label, text string) { p.block(label, "", text, "") }

func (p *printer) block(label, labelColour, text, colour string) {
	indent := strings.Repeat(" ", utf8.RuneCountInString(label))
	for i, line := range wrap(text, max(20, p.Width-len(indent))) {
		if i == 0 {
			p.b.WriteString(p.coloured(label, labelColour))
		} else {
			p.b.WriteString(indent)
		}
		p.b.WriteString(p.coloured(line, colour) + "\n")
	}
}

// wrap breaks text at spaces. A word that is longer than a line stays whole, so
// that it can be copied.
func wrap(text string, width int) []string {
	var out []string
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width:
			out = append(out, line)
			line = word
		default:
			line += " " + word
		}
	}
	return append(out, line)
}

// headline is the answer.
func (p *printer) headline(r *Result) {
	colour := yellow
	switch {
	case r.Verdict == Refused || r.Verdict == Dropped:
		colour = red
	case r.Verdict == Forwarded && r.Culprit == "":
		colour = green
	}
	answer := strings.ToUpper(string(r.Verdict))
	from := r.Client
	if r.From.IsValid() {
		from = r.From.String() + ", " + r.Client
	}
	p.block(answer+"  ", colour, fmt.Sprintf("%s %s from %s", r.Protocol, r.Address, from), bold)
	if r.Service != "" {
		text := fmt.Sprintf("%s (%s), %s, %s", r.Service, r.Kind, planeText(r.DataPlane), r.State)
		if r.Reason != "" {
			text += ": " + r.Reason
		}
		p.wrapped("Service  ", text)
	}
	if r.Culprit != "" {
		p.block("Culprit  ", red, r.Culprit, "")
	}
}

func planeText(d plan.DataPlane) string {
	if d == plan.None {
		return "carried by nothing"
	}
	return "carried by " + string(d)
}

// candidates are the endpoints, as a table.
func (p *printer) candidates(r *Result) {
	if len(r.Candidates) == 0 {
		return
	}
	const most = 20
	width := len("ENDPOINT")
	for _, c := range r.Candidates {
		width = max(width, len(c.Endpoint.String()))
	}
	p.b.WriteString("\n" + p.coloured(fmt.Sprintf("%-*s  %7s  %-7s  %9s  %s", width, "ENDPOINT", "SHARE", "HEALTH", "PACKETS", "WHY"), bold) + "\n")
	for i, c := range r.Candidates {
		if i == most {
			fmt.Fprintf(&p.b, "… and %d more (-o json has them all)\n", len(r.Candidates)-most)
			break
		}
		why := c.Why
		if c.Node != "" {
			why = strings.TrimSuffix("on "+c.Node+", "+why, ", ")
		}
		colour := ""
		if c.Probability == 0 {
			colour = faint
		}
		p.block(fmt.Sprintf("%-*s  %7s  %-7s  %9s  ", width, c.Endpoint, shareText(c.Probability), cmp.Or(c.Health, "-"), count(c.Packets)), colour, why, colour)
	}
	p.b.WriteString("\n")
}

func shareText(s float64) string {
	if s == 0 {
		return "-"
	}
	return strconv.FormatFloat(100*s, 'f', 1, 64) + "%"
}

// count prints a counter.
func count(n *uint64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatUint(*n, 10)
}

func (r *Result) sourceText() string {
	switch {
	case r.Masquerade.Yes:
		return "masqueraded: " + r.Masquerade.Reason
	case r.Masquerade.Source.IsValid():
		return fmt.Sprintf("not masqueraded, the endpoint sees %s: %s", r.Masquerade.Source, r.Masquerade.Reason)
	}
	return "not masqueraded: " + r.Masquerade.Reason
}

// findings prints what to know besides the culprit, and what isn't as planned.
func (p *printer) findings(r *Result) {
	for _, f := range r.Findings {
		colour := map[string]string{SeverityError: red, SeverityWarning: yellow, SeverityNote: faint}[f.Severity]
		text := f.text()
		if strings.TrimSuffix(r.Culprit, ".") == text {
			continue
		}
		p.block(fmt.Sprintf("%-9s", strings.ToUpper(f.Severity[:1])+f.Severity[1:]), colour, text, "")
	}
	for _, m := range r.Mismatches {
		p.block("Mismatch ", yellow, fmt.Sprintf("%s: planned %s, in the kernel %s", m.Object, m.Planned, m.Kernel), "")
	}
}

// probe prints what became of a real packet.
func (p *printer) probe(r *Probe) {
	if r == nil {
		return
	}
	text := fmt.Sprintf("%s in %.1f ms", r.Outcome, 1000*r.Seconds)
	if r.From != "" {
		text = "from " + r.From + ": " + text
	}
	if r.Endpoint.IsValid() {
		text += " by " + r.Endpoint.String()
	}
	if r.Note != "" {
		text += "; " + r.Note
	}
	if r.Says != "" {
		text += "; it " + r.Says
	}
	p.block("Probe    ", bold, text, "")
	for _, line := range r.Conntrack {
		p.wrapped("         ", line)
	}
}

// path is the packet's way, hook by hook; that to one endpoint, and to others
// where it is another one.
func (p *printer) path(r *Result) {
	steps, d := r.Steps, r.Departure
	if len(steps) == 0 && d == nil {
		return
	}
	p.b.WriteString("\n" + p.coloured("The packet's way", bold) + ", with counters of packets so far\n")
	if d != nil {
		p.block("", "", "In "+d.Where+":", bold)
		p.leg(d.Steps)
		if len(steps) == 0 {
			return
		}
		p.block("", "", "On the node:", bold)
	}
	legs, order := map[string][]Step{}, []string{}
	for _, s := range steps {
		if _, ok := legs[s.Leg]; !ok && s.Leg != "" {
			order = append(order, s.Leg)
		}
		legs[s.Leg] = append(legs[s.Leg], s)
	}
	p.leg(legs[""])
	shown := map[string]bool{}
	var same []string
	for _, name := range order {
		way := sameWay(legs[name])
		if shown[way] {
			same = append(same, name)
			continue
		}
		shown[way] = true
		p.b.WriteString(p.coloured("To "+name, bold) + "\n")
		p.leg(legs[name])
	}
	if len(same) > 0 {
		p.wrapped("", "The way to "+strings.Join(same, " and ")+" is alike.")
	}
}

// sameWay returns what ways to endpoints have in common if they are alike.
func sameWay(steps []Step) string {
	var b strings.Builder
	for _, s := range steps {
		fmt.Fprintf(&b, "%s %s %s %s\n", s.Hook, s.Table, s.Chain, s.Kind)
		if s.Kind == KindRule || s.Kind == KindPolicy {
			b.WriteString(s.Outcome + s.Text + "\n")
		}
	}
	return b.String()
}

func (p *printer) leg(steps []Step) {
	hook, where, space := "", "", ""
	for i := range steps {
		s := &steps[i]
		if s.Namespace != space {
			if hook, space = "", s.Namespace; space != "" {
				p.block("", "", "In "+space+":", bold)
			}
		}
		if s.Hook != hook {
			hook, where = s.Hook, ""
			p.b.WriteString(p.coloured(hook, bold) + "\n")
		}
		if at := strings.TrimSpace(s.Table + " " + s.Chain); at != where {
			if where = at; at != "" {
				p.b.WriteString("  " + at + "\n")
			}
		}
		p.step(s)
	}
}

func (p *printer) step(s *Step) {
	colour := ""
	if s.Outcome == "no match" {
		colour = faint
	}
	label := "    "
	if s.Packets != nil {
		label = fmt.Sprintf("%8s  ", count(s.Packets))
	}
	p.block(label, colour, strings.TrimPrefix(s.Text, "-A "+s.Chain+" "), colour)
	outcome := s.Outcome
	if s.Why != "" {
		outcome += " (" + s.Why + ")"
	}
	if outcome != "" {
		p.block("          = ", colour, outcome, colour)
	}
}
