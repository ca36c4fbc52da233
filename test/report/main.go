// Command report reads the events of `go test -json` from standard input,
// prints what a person wants to see of them, and ends with the line
// 'N passed, N failed, N skipped'. It exits with status 1 if anything failed,
// if nothing ran, or, with -fail-skipped, if a test was skipped.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	failSkipped := flag.Bool("fail-skipped", false, "a skipped test is a failure")
	flag.Parse()
	r := newReport(os.Stdout)
	if err := r.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "report: read events:", err)
		os.Exit(1)
	}
	if !r.finish(*failSkipped) {
		os.Exit(1)
	}
}
