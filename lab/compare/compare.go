// Package compare measures what each data plane costs: it runs the same bounded
// loads through every data plane that this host has, and without any proxy as
// the limit, and reports them side by side. `kproxy lab compare` is it.
//
// Every data plane has a network of its own ([load.Rig]): a client, a node and
// backends that are alike, and on the node a kproxy that holds every service in
// that one data plane. So nothing is moved or programmed between two runs, and
// the runs are interleaved: each load goes through every data plane in turn
// before it is repeated. On a machine with other things to do, only figures that
// were measured side by side can be compared, so each one is also given as a
// ratio to the direct one of the same round.
//
// After every run conntrack's table shows what carried it ([checkCarried]); a
// run through another data plane is an error, not a figure.
//
// Nothing is left behind, whether [Run] succeeds, fails or is cancelled; [Down]
// removes what a killed one left. One comparison of a prefix runs at a time.
package compare

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
	"kproxy.dev/kproxy/plan"
)

// Direct is no proxy at all: the node only routes.
const Direct plan.DataPlane = "direct"

// Planes are the ways for packets from client to backend, [Direct] first.
var Planes = []plan.DataPlane{Direct, plan.Userspace, plan.IPTables, plan.IPVS, plan.NFTables}

// Config says what to compare. Start from [DefaultConfig].
type Config struct {
	Prefix   string           // of the namespaces' names, as in lab.Config
	Program  string           // kproxy itself: it is the proxy, the load and the server
	Version  string           // of the program
	Command  string           // that was typed, for the report
	Planes   []plan.DataPlane // what to measure beside [Direct], in any order
	Repeat   int              // rounds
	Services []int            // how many services there are when first packets are measured; ascending
	Slow     int              // this machine is so many times slower than usual
	Progress func(string)

	// Bounds of one run: of throughput, new connections and sessions, and first
	// packets; and of the others.
	Time, Short time.Duration
	// Connections, Sessions and Firsts bound a run too.
	Connections, Sessions, Firsts int
}

// DefaultConfig takes two to five minutes.
func DefaultConfig() Config {
	return Config{
		Prefix: lab.DefaultPrefix, Planes: slices.Clone(Planes[1:]), Repeat: 5, Services: []int{10, 1000, 10000}, Slow: 1, Progress: func(string) {},
		Time: 1500 * time.Millisecond, Short: time.Second, Connections: 25000, Sessions: 4500, Firsts: 1000,
	}
}

// QuickConfig takes under a minute, and says less.
func QuickConfig() Config {
	c := DefaultConfig()
	c.Repeat, c.Services = 3, []int{10, 1000}
	c.Time, c.Short, c.Connections, c.Sessions, c.Firsts = 400*time.Millisecond, 250*time.Millisecond, 8000, 1500, 300
	return c
}

// Bounds of a comparison.
const (
	MaxRepeat   = 10
	MaxServices = 20000
)

var prefixPattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?$`)

// Validate reports every problem of the configuration.
func (c Config) Validate() error {
	var errs []error
	if !prefixPattern.MatchString(c.Prefix) {
		errs = append(errs, fmt.Errorf("prefix %q is not of at most 30 lower-case letters, digits and inner dashes", c.Prefix))
	}
	if len(c.Planes) == 0 {
		errs = append(errs, errors.New("planes: at least one is needed"))
	}
	for i, p := range c.Planes {
		if !slices.Contains(Planes[1:], p) {
			errs = append(errs, fmt.Errorf("planes: %q is none of %v", p, Planes[1:]))
		}
		if slices.Contains(c.Planes[:i], p) {
			errs = append(errs, fmt.Errorf("planes: %s is there twice", p))
		}
	}
	if c.Repeat < 1 || c.Repeat > MaxRepeat {
		errs = append(errs, fmt.Errorf("repeat: %d is not between 1 and %d", c.Repeat, MaxRepeat))
	}
	if len(c.Services) == 0 {
		errs = append(errs, errors.New("services: at least one number is needed"))
	}
	for i, n := range c.Services {
		if n < 1 || n > MaxServices {
			errs = append(errs, fmt.Errorf("services: %d is not between 1 and %d", n, MaxServices))
		}
		if i > 0 && n <= c.Services[i-1] {
			errs = append(errs, fmt.Errorf("services: %d comes after %d; give each number once, the smallest first", n, c.Services[i-1]))
		}
	}
	return errors.Join(errs...)
}

// ErrNoPlane is the error where there is nothing to compare.
var ErrNoPlane = errors.New("this host lacks what is to be compared")

// comparison is one run.
type comparison struct {
	Config
	rigs     []*rig
	report   report.Report
	measured load.Measurement
}

func newComparison(c Config) *comparison {
	x := &comparison{Config: c}
	x.measured = load.Measurement{
		Report: &x.report,
		Begins: func(w load.Work, round, rounds int) {
			c.Progress(fmt.Sprintf("round %d of %d: %s", round+1, rounds, w.Title))
		},
		Ended: func(load.Subject, load.Work, int, *load.Outcome) {},
	}
	return x
}

// Run compares. The report is nil after an error.
func Run(ctx context.Context, c Config) (out *report.Report, err error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if err := Down(c.Prefix); err != nil {
		return nil, fmt.Errorf("remove an earlier comparison: %w", err)
	}
	start := time.Now()
	x := newComparison(c)
	x.report = report.Report{Title: "What each data plane costs", Version: c.Version, Command: c.Command, Started: start.UTC().Truncate(time.Second), Notes: notes(c)}
	defer func() {
		if ctx.Err() != nil {
			err = fmt.Errorf("the comparison was ended before its time: %w", ctx.Err())
		}
		for _, r := range x.rigs {
			err = errors.Join(err, r.down())
		}
		if err != nil {
			out = nil
		}
	}()
	if x.report.Host, err = report.ReadHost(); err != nil {
		return nil, err
	}
	for _, step := range []func(context.Context) error{x.up, x.compare, x.stayed} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	x.report.Seconds = time.Since(start).Seconds()
	x.conclude()
	return &x.report, nil
}

// up builds a rig for every plane that is asked for and that this host has.
func (x *comparison) up(ctx context.Context) error {
	for _, p := range Planes {
		if p != Direct && !slices.Contains(x.Planes, p) {
			continue
		}
		x.Progress(fmt.Sprintf("%s: building its network", p))
		r := newRig(x.Config, p)
		err := r.up(ctx)
		if u, ok := errors.AsType[*unavailable](err); ok {
			x.report.Absent = append(x.report.Absent, report.Absent{Subject: string(p), Reason: u.reason})
			x.Progress(fmt.Sprintf("%s: not on this host: %s", p, u.reason))
			continue
		}
		if err != nil {
			return fmt.Errorf("prepare %s: %w", p, err)
		}
		x.rigs = append(x.rigs, r)
		if r.iptables != "" {
			x.report.Host.Programs = []report.Program{{Name: "iptables", Version: r.iptables}}
		}
	}
	if len(x.rigs) < 2 {
		return fmt.Errorf("compare: %w: no data plane that was asked for: %s", ErrNoPlane, x.report.Absent[len(x.report.Absent)-1].Reason)
	}
	return nil
}

// compare goes through the numbers of services; the other loads run at the
// first of them.
func (x *comparison) compare(ctx context.Context) error {
	for i, n := range x.Services {
		group := fmt.Sprintf("First packets among %s", report.Count(n, "service"))
		appear := load.Work{Group: group, Title: "services appear"}
		programming := load.Figure{Name: fmt.Sprintf("programming-%d", n), Title: "until all are programmed", Unit: "s", Better: report.Lower}
		for _, r := range x.rigs {
			took, err := r.grow(ctx, n)
			if err != nil {
				return err
			}
			if r.plane != Direct {
				x.Progress(fmt.Sprintf("%s: %d services programmed after %.1f s", r.plane, n, took.Seconds()))
				x.measured.Add(appear, programming, r.subject(netip.Addr{}), 0, took.Seconds())
			}
		}
		if i == 0 {
			if err := x.rounds(ctx, x.works(), netip.Addr{}); err != nil {
				return err
			}
		}
		if err := x.rounds(ctx, []load.Work{x.firsts(n, group)}, filler(n/2)); err != nil {
			return err
		}
	}
	return nil
}

// rounds runs loads through every plane; first is the filler for first packets.
func (x *comparison) rounds(ctx context.Context, works []load.Work, first netip.Addr) error {
	var subjects []load.Subject
	for _, r := range x.rigs {
		subjects = append(subjects, r.subject(first))
	}
	for _, w := range works {
		if err := x.measured.Rounds(ctx, w, x.Repeat, subjects); err != nil {
			return err
		}
	}
	return nil
}

// stayed makes sure that at the end every service is still where it was.
func (x *comparison) stayed(ctx context.Context) error {
	for _, r := range x.rigs {
		if r.plane == Direct {
			continue
		}
		if err := r.Programmed(ctx, r.plane, r.services); err != nil {
			return fmt.Errorf("check %s after the loads: %w", r.plane, err)
		}
	}
	return nil
}

// conclude sorts the cases by group and says what the figures tell.
func (x *comparison) conclude() {
	r := &x.report
	var order []string
	for _, w := range x.works() {
		order = append(order, w.Group)
	}
	rank := func(c report.Case) int {
		if i := slices.Index(order, c.Group); i >= 0 {
			return i
		}
		return len(order)
	}
	slices.SortStableFunc(r.Cases, func(a, b report.Case) int { return rank(a) - rank(b) })
	var planes []string
	for _, p := range Planes[1:] {
		planes = append(planes, string(p))
	}
	for _, name := range []string{"throughput", "connections", "sessions"} {
		for _, p := range planes {
			r.Find(name, p, string(Direct))
		}
	}
	few := fmt.Sprintf("-%d", x.Services[0])
	for _, name := range []string{"cpu-per-gb", "cpu-per-10k-connections", "requests-p50", "connect-p50" + few, "first-answer-p50" + few} {
		for _, p := range planes[1:] {
			r.Find(name, planes[0], p)
		}
		for _, p := range planes[2:] {
			r.Find(name, p, planes[1])
		}
	}
	if r.Host.Others.Median > 0.25 {
		r.Findings = append([]string{fmt.Sprintf("Other programs used %.0f%% of the processors: what follows is as much about them as about data planes. Measure again on a calm machine.", 100*r.Host.Others.Median)}, r.Findings...)
	}
	if x.Repeat < 3 {
		r.Doubt("There were only %s: the spread says little.", report.Count(x.Repeat, "round"))
	}
	r.Finish()
}

// lastLine returns the last line that a program logged before it ended, without the program's name and
// the advice to choose another mode.
func lastLine(log string) string {
	lines := strings.Split(strings.TrimSpace(log), "\n")
	line, _, _ := strings.Cut(lines[len(lines)-1], ": get it, or choose")
	return strings.TrimPrefix(line, "kproxy: ")
}
