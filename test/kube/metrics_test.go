package kube

import (
	"fmt"
	"io"
	"regexp"
	"strconv"
	"time"
)

var reached = regexp.MustCompile(`(?m)^kubeproxy_network_programming_duration_seconds_count\{ip_family="IPv4"\} (\S+)$`)

// testProgrammingTime: changes that the real controller of EndpointSlices made,
// for the tests before, were timed from what happened to the pod.
func testProgrammingTime(w *world) {
	w.Helper()
	client := w.net.Node.HTTPClient(10 * time.Second)
	w.eventually("the time that changes took", func() error {
		resp, err := client.Get("http://127.0.0.1:10249/metrics")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		m := reached.FindSubmatch(text)
		if m == nil {
			return fmt.Errorf("no metric %s", reached)
		}
		if n, err := strconv.ParseFloat(string(m[1]), 64); err != nil || n < 1 {
			return fmt.Errorf("%s changes (%v), want some", m[1], err)
		}
		return nil
	})
}
