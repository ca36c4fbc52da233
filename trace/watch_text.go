package trace

import (
	"fmt"
	"strings"
)

// Text prints a packet for a person: the answer first, then what it met. same is a packet
// printed before that met the same, if there is one.
func (k *Packet) Text(l Look, same *Packet) string {
	p := newPrinter(l)
	colour := map[Comparison]string{AsPredicted: green, Differs: red, NotPredicted: yellow}[k.Verdict]
	p.block(strings.ToUpper(string(k.Verdict))+"  ", colour, k.summary(), bold)
	if k.Difference != "" {
		p.block(map[Comparison]string{Differs: "Differs  ", NotPredicted: "Because  "}[k.Verdict], colour, k.Difference, "")
	}
	if same != nil {
		p.wrapped("         ", "what it met is alike that of "+same.Client.String())
		return p.b.String()
	}
	where := ""
	for _, s := range k.Steps {
		if at := s.Hook + "  " + s.Table + " " + s.Chain; at != where {
			where = at
			p.b.WriteString("  " + p.coloured(at, bold) + "\n")
		}
		sign, colour := "  = ", ""
		switch {
		case k.Verdict == NotPredicted:
			sign = "    "
		case !s.Met:
			sign, colour = "  - ", red
		case !s.Predicted:
			sign, colour = "  + ", red
		}
		p.block(sign, colour, strings.TrimPrefix(s.Text, "-A "+s.Chain+" "), colour)
	}
	return p.b.String()
}

func (k *Packet) summary() string {
	text := "from " + k.Client.String()
	if k.State != "" {
		text = k.State + ", " + text
	}
	if k.In != "" {
		text += ", in by " + k.In
	}
	switch k.Fate {
	case Sent:
		return fmt.Sprintf("%s: sent to %s by %s", text, k.To, k.Out)
	case Delivered:
		return fmt.Sprintf("%s: delivered to %s on this node", text, k.To)
	case Stopped:
		return fmt.Sprintf("%s: dropped by %s", text, k.Where)
	}
	return fmt.Sprintf("%s: not seen any more after %s", text, k.Where)
}

// Same returns a packet among some that met the same; nil if none did.
func (k *Packet) Same(some []Packet) *Packet {
	for i := range some {
		if o := &some[i]; o.Verdict == k.Verdict && fmt.Sprint(o.Steps) == fmt.Sprint(k.Steps) {
			return o
		}
	}
	return nil
}

// Summary returns what there is to say when all packets have been printed.
func (w *Watched) Summary(l Look) string {
	p := newPrinter(l)
	if len(w.Counters) > 0 {
		p.b.WriteString(p.coloured("Counters", bold) + ", packets before and after\n")
		for _, c := range w.Counters {
			p.block(fmt.Sprintf("%9d %9d  ", c.Before, c.After), "", c.Text, "")
		}
	}
	for _, n := range w.Notes {
		p.block("Note     ", faint, n, "")
	}
	asPredicted, differ := 0, 0
	for i := range w.Packets {
		switch w.Packets[i].Verdict {
		case AsPredicted:
			asPredicted++
		case Differs:
			differ++
		}
	}
	from := "any client"
	if w.From.IsValid() {
		from = w.From.String()
	}
	p.wrapped("Watched  ", fmt.Sprintf("%s %s from %s for %.1f s: %d packets, %d as predicted, %d differ", w.Protocol, w.Address, from, w.Seconds, len(w.Packets), asPredicted, differ))
	return p.b.String()
}
