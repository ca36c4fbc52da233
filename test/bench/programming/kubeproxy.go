package programming

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cache is the folder of what takes long to make, next to test/kube's. What this
// program put there and hasn't used for a month is removed.
func cache() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find cache: %w", err)
	}
	dir = filepath.Join(dir, "kproxy-kube")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make cache: %w", err)
	}
	const month = 30 * 24 * time.Hour
	for _, pattern := range []string{"kube-proxy-*", "objects-*"} {
		names, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return "", fmt.Errorf("look through cache: %w", err)
		}
		for _, name := range names {
			if info, err := os.Stat(name); err == nil && time.Since(info.ModTime()) > month {
				_ = os.RemoveAll(name) // next time, then
			}
		}
	}
	return dir, nil
}

// controlPlanePrograms returns the folder of etcd and kube-apiserver.
func controlPlanePrograms(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "test/kube/setup.sh")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("build the control plane, in the repository's root: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// kubeProxyProgram returns kube-proxy as its project builds it, but from the Go
// module: with the optimising compiler, unlike the control plane, whose speed
// isn't measured. Building it takes some minutes once.
func kubeProxyProgram(ctx context.Context) (path, version string, err error) {
	goCommand := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir, cmd.Stderr = "test/kube/controlplane", os.Stderr
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("go %s: %w", args[0], err)
		}
		return strings.TrimSpace(string(out)), err
	}
	version, err = goCommand("list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes")
	if err != nil {
		return "", "", err
	}
	dir, err := cache()
	if err != nil {
		return "", "", err
	}
	unlock, err := lock(filepath.Join(dir, "lock-kube-proxy"))
	if err != nil {
		return "", "", err
	}
	defer unlock()
	path = filepath.Join(dir, fmt.Sprintf("kube-proxy-%s-%s", version, runtime.Version()))
	if _, err := os.Stat(path); err == nil {
		now := time.Now()
		return path, version, os.Chtimes(path, now, now)
	}
	fmt.Fprintf(os.Stderr, "building kube-proxy %s, which takes minutes once\n", version)
	number := strings.Split(strings.TrimPrefix(version, "v"), ".")
	const stamp = "k8s.io/component-base/version"
	flags := fmt.Sprintf("-s -w -X %s.gitVersion=%s -X %s.gitMajor=%s -X %s.gitMinor=%s", stamp, version, stamp, number[0], stamp, number[1])
	partly := path + ".new"
	if _, err := goCommand("build", "-buildvcs=false", "-trimpath", "-ldflags", flags, "-o", partly, "k8s.io/kubernetes/cmd/kube-proxy"); err != nil {
		return "", "", err
	}
	return path, version, os.Rename(partly, path)
}

// lock takes a lock that other processes of this program respect.
func lock(name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock cache: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock cache: %w", err)
	}
	return func() { f.Close() }, nil
}
