package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// The marks of the table in a page.
const (
	resultsBegin = "<!-- results -->\n"
	resultsEnd   = "<!-- end of results -->"
)

// writePage brings the reports in the results into the table of a page. A cell of a test that no report has stays.
func (o *options) writePage() error {
	page, err := os.ReadFile(o.page)
	if err != nil {
		return err
	}
	reports, err := readReports(o.results)
	if err != nil {
		return err
	}
	text, err := withReports(string(page), reports)
	if err != nil {
		return fmt.Errorf("%s: %w", o.page, err)
	}
	return os.WriteFile(o.page, []byte(text), 0o644)
}

// readReports reads the reports of all runs, a later one's over an earlier one's unless it skipped the test, by proxy and test.
func readReports(results string) (map[string]map[string]spec, error) {
	reports := map[string]map[string]spec{}
	for name := range proxies {
		files, err := filepath.Glob(filepath.Join(results, name, "*", "report.json"))
		if err != nil {
			return nil, err
		}
		slices.Sort(files) // by when they began
		for _, file := range files {
			specs, partial, err := report(file)
			if err != nil {
				return nil, err
			}
			fmt.Printf("%s: %d tests", file, len(specs))
			if partial != "" {
				fmt.Printf(", not all that were chosen: %s", partial)
			}
			fmt.Println()
			if reports[name] == nil {
				reports[name] = map[string]spec{}
			}
			for test, s := range specs {
				if _, ran := reports[name][test]; s.State != "skipped" || !ran {
					reports[name][test] = s
				}
			}
		}
	}
	return reports, nil
}

// withReports returns a page whose table has what reports say, by proxy and test.
func withReports(page string, reports map[string]map[string]spec) (string, error) {
	before, rest, ok := strings.Cut(page, resultsBegin)
	table, after, ok2 := strings.Cut(rest, resultsEnd)
	if !ok || !ok2 {
		return "", errors.New("it has no marks for the results")
	}
	states := map[string]map[string]string{} // by test as it stands in the table, then proxy
	set := func(test, proxy, state string) {
		if states[test] == nil {
			states[test] = map[string]string{}
		}
		states[test][proxy] = state
	}
	var columns []string
	for i, line := range strings.Split(strings.TrimSpace(table), "\n") {
		cells := strings.Split(strings.Trim(line, "|"), " | ")
		for c := range cells {
			cells[c] = strings.TrimSpace(cells[c])
		}
		switch {
		case i == 0:
			columns = cells[1:]
		case i > 1:
			for c, state := range cells[1:] {
				set(cells[0], columns[c], state)
			}
		}
	}
	for name, specs := range reports {
		for test, s := range specs {
			set(strings.ReplaceAll(strings.TrimPrefix(test, "[sig-network] "), "|", `\|`), name, s.State)
		}
	}
	columns = slices.DeleteFunc([]string{"kube-proxy", "kube-proxy-nftables", "iptables", "nftables", "userspace", "auto"}, func(name string) bool {
		return reports[name] == nil && !slices.Contains(columns, name)
	})
	var out strings.Builder
	fmt.Fprintf(&out, "| test | %s |\n|---|%s\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
	for _, test := range slices.Sorted(maps.Keys(states)) {
		fmt.Fprintf(&out, "| %s |", test)
		for _, name := range columns {
			fmt.Fprintf(&out, " %s |", states[test][name])
		}
		out.WriteString("\n")
	}
	return before + resultsBegin + out.String() + resultsEnd + after, nil
}
