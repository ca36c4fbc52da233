// Command report makes one report of the parts that benchmarks wrote: JSON, a
// Markdown table and an HTML page. It compares the ratios with those of the
// committed baseline and names the ones that have become worse by more than noise.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"kproxy.dev/kproxy/test/bench/result"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	set := flag.NewFlagSet("report", flag.ContinueOnError)
	out := set.String("out", "bin/bench", "`FOLDER` for bench.json, bench.md and bench.html")
	baseline := set.String("baseline", "test/bench/baseline.json", "`FILE` with the ratios of an earlier run")
	keep := set.Bool("write-baseline", false, "make this run the baseline")
	command := set.String("command", "", "`TEXT` that the report says it was made by (default: what the first part says)")
	if err := set.Parse(args); err != nil {
		return err
	}
	if set.NArg() == 0 {
		return errors.New("name the reports to join")
	}
	var parts []*result.Report
	for _, name := range set.Args() {
		part, err := result.Read(name)
		if err != nil {
			return err
		}
		parts = append(parts, part)
	}
	r, err := result.Merge(parts...)
	if err != nil {
		return err
	}
	if *command != "" {
		r.Command = *command
	}
	if err := doubts(r, *baseline); err != nil {
		return err
	}
	if *keep {
		if err := r.Baseline().Write(*baseline); err != nil {
			return err
		}
	}
	return write(r, *out)
}

// doubts adds what has become worse, and what makes the figures doubtful.
func doubts(r *result.Report, baseline string) error {
	if r.Quick {
		warn(r, "This was a quick run, each work once and short: it shows that the rig works, and its figures say nothing.")
		return nil
	}
	if r.Host.Steal.Max > 0.05 {
		warn(r, fmt.Sprintf("The hypervisor took up to %.0f%% of the processors away during a run.", 100*r.Host.Steal.Max))
	}
	if r.Host.Others.Median > 0.05 {
		warn(r, fmt.Sprintf("Other programs used %.0f%% of the processors (median of the runs).", 100*r.Host.Others.Median))
	}
	old, err := result.ReadBaseline(baseline)
	if errors.Is(err, os.ErrNotExist) {
		warn(r, "There is no baseline to compare with.")
		return nil
	}
	if err != nil {
		return err
	}
	worse := r.Regressions(old)
	if elsewhere := r.Elsewhere(old); elsewhere != "" && len(worse) > 0 {
		warn(r, elsewhere)
	}
	for _, text := range worse {
		warn(r, "Worse than the baseline: "+text+".")
	}
	none := fmt.Sprintf("No ratio is worse than that of the baseline of %s by more than noise.", old.Started)
	if len(worse) == 0 && !slices.Contains(r.Notes, none) {
		r.Notes = append(r.Notes, none)
	}
	return nil
}

// warn adds a warning, unless a report that is read again has it already.
func warn(r *result.Report, text string) {
	if !slices.Contains(r.Warnings, text) {
		r.Warnings = append(r.Warnings, text)
	}
}

func write(r *result.Report, folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("make folder for the report: %w", err)
	}
	if err := r.Write(filepath.Join(folder, "bench.json")); err != nil {
		return err
	}
	for name, print := range map[string]func(io.Writer) error{"bench.md": r.WriteMarkdown, "bench.html": r.WriteHTML} {
		f, err := os.Create(filepath.Join(folder, name))
		if err != nil {
			return fmt.Errorf("write report: %w", err)
		}
		if err := errors.Join(print(f), f.Close()); err != nil {
			return fmt.Errorf("write report: %w", err)
		}
	}
	for _, text := range r.Warnings {
		fmt.Println("note:", text)
	}
	fmt.Printf("%s/bench.md, bench.html and bench.json hold the report\n", folder)
	return r.WriteTargets(os.Stdout)
}
