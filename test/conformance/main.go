// Command conformance makes a Kubernetes cluster on this machine, with real kubelets, containerd
// and pods, lets kproxy or kube-proxy serve it, and runs upstream's own network tests against
// that. See docs/conformance.md; `make conformance` runs it, as root.
//
// All of it lives in namespaces of processes, mounts and networks: the program starts itself as
// the first process of such namespaces, and when that one ends, however it does, the kernel ends
// every process, mount and link of the cluster. Only empty control groups and the folder of its
// state are then left, which the outer program removes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// options holds what the user chose.
type options struct {
	modes      string
	nodes      int
	focus      string
	podNetwork string
	procs      int
	quick      bool
	events     bool
	rollout    bool
	plugin     bool
	readme     bool
	version    string // of the kproxy that serves, as a release's
	keep       bool
	page       string
	programs   string // the folder that build.sh printed
	repository string
	state      string // of the cluster, on a real file system: overlayfs doesn't lie on itself
	results    string
}

func main() {
	runtime.LockOSThread() // a child dies with the thread that started it (PR_SET_PDEATHSIG)
	if len(os.Args) > 2 && os.Args[1] == "first-process" {
		os.Exit(firstProcess(os.Args[2:]))
	}
	var o options
	inside := flag.Bool("inside", false, "for the program's own use")
	flag.StringVar(&o.modes, "modes", "nftables", "what to test, one after the other: userspace, iptables, nftables, auto, kube-proxy, kube-proxy-nftables")
	flag.IntVar(&o.nodes, "nodes", 3, "number of nodes, 1 to 9, in three zones")
	flag.StringVar(&o.focus, "focus", "", "regular expression of upstream's tests to run, instead of all that concern a proxy")
	flag.StringVar(&o.podNetwork, "pod-network", "bridge", "how pods are connected to their node: bridge, routed, unnumbered")
	flag.IntVar(&o.procs, "procs", 4, "tests that run at the same time")
	flag.BoolVar(&o.quick, "quick", false, "run a dozen tests only")
	flag.BoolVar(&o.events, "events", false, "write also an event of go test -json for each test")
	flag.BoolVar(&o.rollout, "rollout", false, "instead of upstream's tests, roll kproxy out beside kube-proxy, upgrade it and go back, under load")
	flag.BoolVar(&o.plugin, "plugin", false, "instead of upstream's tests, ask all nodes by kubectl kproxy, also while some don't answer")
	flag.BoolVar(&o.readme, "readme", false, "instead of upstream's tests, follow README and docs/helm.md by their text, from kube-proxy in mode iptables and back")
	flag.BoolVar(&o.keep, "keep", false, "leave the cluster running until the program is interrupted, and print how to enter it")
	flag.StringVar(&o.page, "page", "", "only write the table of the reports that there are into this page")
	flag.StringVar(&o.programs, "programs", "", "folder that build.sh printed")
	flag.StringVar(&o.results, "results", filepath.Join("bin/conformance", os.Getenv("KUBERNETES")), "folder of reports and logs; $KUBERNETES, which build.sh goes by, has one of its own")
	flag.StringVar(&o.state, "state", "", "for the program's own use")
	flag.Parse()
	err := o.check()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(2)
	case o.page != "":
		err = o.writePage()
	case *inside:
		err = runInside(o)
	default:
		err = runOutside(o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

// check completes the options, or says which are wrong.
func (o *options) check() error {
	var errs []error
	if os.Geteuid() != 0 && o.page == "" {
		errs = append(errs, errors.New("a cluster of namespaces needs root"))
	}
	if flag.NArg() > 0 {
		errs = append(errs, fmt.Errorf("unexpected argument %q", flag.Arg(0)))
	}
	for _, m := range strings.Split(o.modes, ",") {
		p, ok := proxies[m]
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("-modes: no proxy is called %q; there are userspace, iptables, nftables, auto, kube-proxy, kube-proxy-nftables", m))
		case o.readme && m != "iptables":
			errs = append(errs, fmt.Errorf("-readme: kproxy takes kube-proxy's mode, which here is iptables: not %s", m))
		case p.kubeProxyMode != "" && (o.rollout || o.plugin):
			errs = append(errs, fmt.Errorf("-rollout, -plugin: %s is no mode of kproxy", m))
		}
	}
	if _, err := regexp.Compile(o.focus); err != nil {
		errs = append(errs, fmt.Errorf("-focus: %w", err))
	}
	if o.procs < 1 {
		errs = append(errs, fmt.Errorf("-procs: %d is less than 1", o.procs))
	}
	if o.nodes < 1 || o.nodes > 9 {
		errs = append(errs, fmt.Errorf("-nodes: %d is not between 1 and 9", o.nodes))
	}
	if _, ok := podNetworks[o.podNetwork]; !ok {
		errs = append(errs, fmt.Errorf("-pod-network: %q is none of bridge, routed and unnumbered", o.podNetwork))
	}
	if o.programs == "" && o.page == "" {
		errs = append(errs, errors.New("-programs: no folder; build.sh prints one"))
	}
	var err error
	if o.repository, err = os.Getwd(); err != nil {
		errs = append(errs, err)
	}
	if _, err := os.Stat(filepath.Join(o.repository, "deploy/base")); err != nil {
		errs = append(errs, fmt.Errorf("run it in the folder of the repository: %w", err))
	}
	o.version = "conformance"
	if o.readme {
		text, err := os.ReadFile(filepath.Join(o.repository, "README.md"))
		m := regexp.MustCompile(`/releases/download/(v[^/]+)/FILE`).FindSubmatch(text)
		if m == nil {
			errs = append(errs, fmt.Errorf("README.md doesn't say where a release's files are: %w", err))
		} else {
			o.version = string(m[1]) + unreleased
		}
	}
	if o.results, err = filepath.Abs(o.results); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// cgroupName is the control group of all pods, in each hierarchy.
const cgroupName = "kproxy-conformance"

// runOutside starts the program again in namespaces of its own, waits for it and tidies up.
func runOutside(o options) (err error) {
	lock, err := os.OpenFile("/run/kproxy-conformance.lock", os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return errors.New("another cluster runs on this machine: wait for it, or end it")
	}
	if err := removeStates(); err != nil {
		return fmt.Errorf("remove what an earlier run left: %w", err)
	}
	if o.state, err = os.MkdirTemp("", stateName); err != nil {
		return err
	}
	removeGroups()
	defer func() {
		removeGroups()
		err = errors.Join(err, os.RemoveAll(o.state))
	}()
	if err := os.MkdirAll(o.results, 0o755); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	defer stop()
	if err := o.release(ctx); err != nil {
		return fmt.Errorf("make a release: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := append([]string{"first-process", self, "-inside", "-state", o.state}, os.Args[1:]...)
	cmd := exec.Command(self, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		Setpgid:    true, Pdeathsig: syscall.SIGKILL,
	}
	interrupts := make(chan os.Signal, 2)
	signal.Notify(interrupts, ends...)
	defer signal.Stop(interrupts)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start in namespaces of its own: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-interrupts:
		_ = cmd.Process.Signal(syscall.SIGTERM) // it reports what has ended by now
	}
	select {
	case <-done:
	case <-interrupts:
	case <-time.After(reportWithin):
	}
	if cmd.Process.Kill() == nil { // with the first process end all others of its namespace
		<-done
	}
	return errors.New("interrupted")
}

// ends are the signals that interrupt a run.
var ends = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}

// reportWithin bounds what an interrupted run still does.
const reportWithin = 90 * time.Second

// stateName begins the name of a state's folder, in [os.TempDir]. Numbers follow.
const stateName = "kproxy-conformance"

// removeStates removes the folders of runs that were killed. Where a file system is mounted in one it is unmounted first, or
// the folder stays.
func removeStates() error {
	states, err := filepath.Glob(filepath.Join(os.TempDir(), stateName+"[0-9]*"))
	if err != nil || len(states) == 0 {
		return err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var errs []error
	for _, state := range states {
		var mounted []string
		for line := range strings.Lines(string(mounts)) {
			at := strings.Fields(line)[4] // proc_pid_mountinfo(5): the mount point; a space in it is \040
			if at == state || strings.HasPrefix(at, state+"/") {
				mounted = append(mounted, at)
			}
		}
		var err error
		slices.Sort(mounted)
		for _, at := range slices.Backward(mounted) { // what is mounted on another mount before that
			if err = unix.Unmount(strings.ReplaceAll(at, `\040`, " "), unix.UMOUNT_NOFOLLOW); err != nil {
				err = fmt.Errorf("unmount %s: %w", at, err)
				break
			}
		}
		if err == nil {
			err = os.RemoveAll(state)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removeGroups removes the control groups of pods, which no process is in any more.
func removeGroups() {
	roots, _ := filepath.Glob("/sys/fs/cgroup/*/" + cgroupName) // of version 1
	for _, root := range append(roots, "/sys/fs/cgroup/"+cgroupName) {
		var groups []string
		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				groups = append(groups, path)
			}
			return nil
		})
		for i := len(groups) - 1; i >= 0; i-- { // children first
			_ = os.Remove(groups[i])
		}
	}
}

// firstProcess is the first of a namespace of processes: it gives it a /proc, starts a program
// and waits for all that end, as those do that have lost their parent, until the program ends. It passes SIGTERM on to the program.
func firstProcess(command []string) int {
	err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, "")
	if err == nil {
		err = syscall.Mount("proc", "/proc", "proc", 0, "")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance: mount /proc:", err)
		return 1
	}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, syscall.SIGTERM)
	p, err := os.StartProcess(command[0], command, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		return 1
	}
	go func() {
		for s := range terminated {
			_ = p.Signal(s) // it may have ended
		}
	}()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 1
		case pid == p.Pid && status.Exited():
			return status.ExitStatus()
		case pid == p.Pid:
			return 128 + int(status.Signal())
		}
	}
}
