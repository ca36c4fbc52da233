package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// quick are a dozen of upstream's tests, of which each is about something else that a proxy does.
var quick = []string{
	"Services should serve a basic endpoint from pods",
	"Services should serve multiport endpoints from pods",
	"Services should be able to create a functioning NodePort service",
	"Services should be able to switch session affinity for service with type clusterIP",
	"Services should be able to change the type from ExternalName to ClusterIP",
	"Services should allow pods to hairpin back to themselves through services",
	"Services should be rejected when no endpoints exist",
	"Services should respect internalTrafficPolicy=Local Pod to Pod",
	"Services should preserve source pod IP for traffic thru service cluster IP",
	"Services should implement service.kubernetes.io/service-proxy-name",
	"Conntrack should be able to preserve UDP traffic when server pod cycles for a ClusterIP service",
	"Conntrack proxy implementation should not be vulnerable to the invalid conntrack state bug",
	"LoadBalancers .* should be able to change the type and ports of a TCP service",
	"EndpointSlice should support a Service with multiple ports specified in multiple EndpointSlices",
}

// left are the tests that are left out, and why.
var left = []struct{ tests, why string }{
	{"evicted pods", "the kubelets here don't measure local storage"},
	{"should only target nodes with endpoints", "upstream asks addresses of IPv6 without brackets, on dual stack"},
	{"configurable pod resolv.conf|[Pp]rovider.GCE|DNS configMap|Internet connection|Feature:Networking-IPv4|Feature:Networking-IPv6|using DNS", "they want agnhost's own DNS, a cloud or the internet"},
	{"SCTP|sctp", "the kernel of the run had none"},
	{"NetworkPolicy|Netpol|Ingress|Gateway|IPerf2|KubeProxyNFAcct|Loadbalancing: L7|KubeProxy should", "no matter of a service proxy, or of kube-proxy's own"},
	{"PerformanceDNS|Scale|large number of|rolling update|work after restarting apiserver|recreate its iptables rules|work after restarting kube-proxy", "they take long, or change the machine's"},
	{"API operations|lifecycle of|NodePort collisions|out-of-range|release NodePorts|find a service from|delete a collection|Mirroring|EndpointsController|Granular Checks: Pods|static URL|kube-proxy urls|" +
		"should create (pod|service|a single)|dual-stack node|reach pod|logs on node|API Server|service status|ServiceCIDR and|terminating Pod|forward", "the API server and its controllers pass them without a proxy"},
}

func skips() string {
	var all []string
	for _, l := range left {
		all = append(all, l.tests)
	}
	return strings.Join(all, "|")
}

// spec is one test in ginkgo's report.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct {
		Message  string
		Location struct {
			FileName   string
			LineNumber int
		}
	}
}

// runName is how the folder of a run is called, by when it began.
const runName = "20060102T150405Z"

// test runs upstream's tests and returns how many have failed. Ginkgo's reports are in a folder of this run. When ctx ends, they have
// the tests that have ended by then.
func (c *cluster) test(ctx context.Context) (failed int, err error) {
	dir := filepath.Join(c.results, c.proxy, time.Now().UTC().Format(runName))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return 0, err
	}
	defer log.Close()
	focus := c.focus
	if c.quick {
		focus = strings.Join(quick, "|")
	}
	limit := "90m"
	if c.quick {
		limit = "15m"
	}
	cmd := exec.CommandContext(ctx, c.program("ginkgo"), fmt.Sprintf("--procs=%d", c.procs), "--no-color", "--timeout="+limit, "--output-dir", dir, "--json-report=report.json", "--junit-report=junit.xml",
		"--focus", cmp.Or(focus, `\[sig-network\]`), "--skip", skips(), c.program("e2e.test"), "--",
		"--provider=local", "--kubeconfig="+c.kube, "--kubectl-path="+c.program("kubectl"), "--host=https://"+controlPlane+":6443",
		"--prepull-images=false", "--num-nodes="+fmt.Sprint(c.options.nodes), "--minStartupPods=0", "--delete-namespace-on-failure=true", "--dump-logs-on-failure=false")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.kube)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { // as ^C in a terminal, twice: it reports, and leaves out what tests do to tidy up
		err := syscall.Kill(-cmd.Process.Pid, syscall.SIGINT)
		time.Sleep(time.Second)
		return errors.Join(err, syscall.Kill(-cmd.Process.Pid, syscall.SIGINT))
	}
	cmd.WaitDelay = reportWithin / 2
	ran := cmd.Run()
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportWithin/4)
	defer cancel()
	if logs, err := c.kubectl(after, "-n", "kube-system", "logs", "-l", "k8s-app in (kproxy, kube-proxy)", "--tail=-1", "--prefix", "--max-log-requests=9"); err == nil {
		_ = os.WriteFile(filepath.Join(dir, "proxy.log"), []byte(logs), 0o644)
	}
	specs, partial, err := report(filepath.Join(dir, "report.json"))
	if err != nil {
		return 0, errors.Join(fmt.Errorf("run upstream's tests, see %s: %w", log.Name(), ran), err)
	}
	passed := 0
	for _, name := range slices.Sorted(maps.Keys(specs)) {
		s := specs[name]
		if c.events {
			c.writeEvents(name, s)
		}
		switch s.State {
		case "passed":
			passed++
		case "skipped":
			fmt.Printf("skipped: %s: %s\n", name, s.Failure.Message)
		default:
			failed++
			fmt.Printf("%s: %s: %.300s\n", s.State, name, s.Failure.Message)
		}
	}
	fmt.Printf("%s: %d passed, %d failed\n", c.proxy, passed, failed)
	if partial != "" {
		fmt.Printf("%s: not all that were chosen: %s\n", c.proxy, partial)
	}
	if passed+failed == 0 {
		return failed, fmt.Errorf("no test ran, see %s", log.Name())
	}
	if ctx.Err() != nil {
		return failed, nil
	}
	if c.quick {
		err = unmatched(quick, specs)
	}
	if ran != nil && failed == 0 { // its time was up, or not all that it began has ended
		err = errors.Join(err, fmt.Errorf("upstream's tests, see %s: %w", log.Name(), ran))
	}
	return failed, err
}

// unmatched returns an error that names each pattern no test that ran matches.
func unmatched(patterns []string, specs map[string]spec) error {
	var errs []error
	for _, p := range patterns {
		is := regexp.MustCompile(p)
		if !slices.ContainsFunc(slices.Collect(maps.Keys(specs)), is.MatchString) {
			errs = append(errs, fmt.Errorf("no test ran that %q matches", p))
		}
	}
	return errors.Join(errs...)
}

// writeEvents writes what became of a test as go test -json does (go doc test2json), for test/report.
func (c *cluster) writeEvents(name string, s spec) {
	event := map[string]any{"Package": "test/conformance (" + c.proxy + ")", "Test": name, "Elapsed": s.RunTime.Seconds()}
	write := func(action string) {
		event["Action"] = action
		line, err := json.Marshal(event)
		if err != nil {
			panic(err) // strings and numbers
		}
		fmt.Printf("%s\n", line)
	}
	if f := s.Failure; f.Message != "" {
		event["Output"] = fmt.Sprintf("    %s:%d: %s\n", filepath.Base(f.Location.FileName), f.Location.LineNumber, f.Message)
		write("output")
		delete(event, "Output")
	}
	switch s.State {
	case "passed":
		write("pass")
	case "skipped":
		write("skip")
	default:
		write("fail")
	}
}

// report reads the tests that have ended from ginkgo's report, by name, and why others haven't that were chosen, if so.
func report(file string) (specs map[string]spec, partial string, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, "", err
	}
	var suites []struct {
		SpecReports                []spec
		SpecialSuiteFailureReasons []string
	}
	if err := json.Unmarshal(text, &suites); err != nil {
		return nil, "", fmt.Errorf("read %s: %w", file, err)
	}
	specs = map[string]spec{}
	for _, suite := range suites {
		partial = strings.Join(suite.SpecialSuiteFailureReasons, ", ")
		for _, s := range suite.SpecReports {
			if s.LeafNodeType != "It" || s.State == "interrupted" || s.State == "skipped" && s.Failure.Message == "" { // not chosen
				continue
			}
			specs[strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")] = s
		}
	}
	return specs, partial, nil
}
