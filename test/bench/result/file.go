package result

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
)

// Read reads a report.
func Read(name string) (*Report, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read report: %w", err)
	}
	r := &Report{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("read report %s: %w", name, err)
	}
	return r, nil
}

// Write writes the report as JSON.
func (r *Report) Write(name string) error { return writeJSON(name, r) }

func writeJSON(name string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if err := os.WriteFile(name, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}

// Merge joins reports of one machine into one: the cases in order, and of each
// subject the values of all of them. So a long measurement may be made in parts.
func Merge(reports ...*Report) (*Report, error) {
	if len(reports) == 0 {
		return nil, errors.New("merge reports: there are none")
	}
	out := *reports[0]
	out.Cases, out.Notes, out.Warnings, out.Absent = nil, nil, nil, nil
	out.Host.Peers, out.Seconds = nil, 0
	for _, r := range reports {
		if r.Host.Kernel != out.Host.Kernel {
			return nil, fmt.Errorf("merge reports: they are of two kernels, %s and %s", out.Host.Kernel, r.Host.Kernel)
		}
		if r.Started.Before(out.Started) {
			out.Started = r.Started
		}
		out.Seconds += r.Seconds
		out.Quick = out.Quick || r.Quick
		out.Host.Steal, out.Host.Others = wider(out.Host.Steal, r.Host.Steal), wider(out.Host.Others, r.Host.Others)
		out.Host.Peers = union(out.Host.Peers, r.Host.Peers)
		out.Absent = union(out.Absent, r.Absent)
		out.Notes, out.Warnings = union(out.Notes, r.Notes), union(out.Warnings, r.Warnings)
		for _, c := range r.Cases {
			if err := out.add(c); err != nil {
				return nil, err
			}
		}
	}
	for i := range out.Cases {
		out.Cases[i].Judge()
	}
	return &out, nil
}

func union[T comparable](a, b []T) []T {
	for _, v := range b {
		if !slices.Contains(a, v) {
			a = append(a, v)
		}
	}
	return a
}
