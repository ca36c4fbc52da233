// Command report reads the events of `go test -json` from standard input,
// prints what a person wants to see of them, and ends with the line
// 'N passed, N failed, N skipped'. It exits with status 1 if anything failed,
// if nothing ran, or, with -fail-skipped, if a test was skipped. A signal that ends it lets it say what is known by then.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	failSkipped := flag.Bool("fail-skipped", false, "a skipped test is a failure")
	flag.Parse()
	r := newReport(os.Stdout)
	events, in := io.Pipe()
	go func() {
		_, err := io.Copy(in, os.Stdin)
		in.CloseWithError(err)
	}()
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	go func() { in.CloseWithError(fmt.Errorf("cut short: %s", <-ended)) }()
	err := r.read(events)
	ok := r.finish(*failSkipped)
	if err != nil {
		fmt.Fprintln(os.Stderr, "report: read events:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}
