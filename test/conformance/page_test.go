package main

import (
	"os"
	"testing"
)

// A run brings its own results into the page, and leaves those of other runs.
func TestPage(t *testing.T) {
	const page = "Before.\n" + resultsBegin + `| test | kube-proxy | iptables |
|---|---|---|
| DNS should a \| b | passed |  |
| Services should c | failed | passed |
` + resultsEnd + "\nAfter.\n"
	const want = "Before.\n" + resultsBegin + `| test | kube-proxy | iptables | userspace |
|---|---|---|---|
| DNS should a \| b | passed | failed |  |
| Services should c | failed | passed | passed |
| Services should d |  | passed |  |
` + resultsEnd + "\nAfter.\n"
	passed, failed := spec{State: "passed"}, spec{State: "failed"}
	got, err := withReports(page, map[string]map[string]spec{
		"iptables":  {"[sig-network] DNS should a | b": failed, "[sig-network] Services should d": passed},
		"userspace": {"[sig-network] Services should c": passed},
	})
	if err != nil || got != want {
		t.Errorf("error %v, page\n%s\nwant\n%s", err, got, want)
	}
	if _, err := withReports("no table", nil); err == nil {
		t.Error("a page without marks is taken")
	}
}

// What stands in the page's table is read as it was written.
func TestPageWithoutReports(t *testing.T) {
	page, err := os.ReadFile("results.md")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := withReports(string(page), nil); err != nil || got != string(page) {
		t.Errorf("error %v, page\n%s", err, got)
	}
}
