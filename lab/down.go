package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// termGrace is how long processes in a lab that is removed have to end after
// SIGTERM.
const termGrace = time.Second

// DownAll removes the lab with the given prefix, also one that another process left: it ends the
// processes in its namespaces and removes them and the host link. Names that
// merely begin alike ("kproxy-lab2-node") are left alone. Nothing there is no error.
func DownAll(prefix string) error {
	if !prefixPattern.MatchString(prefix) {
		return fmt.Errorf("prefix %q is not of lower-case letters, digits and inner dashes", prefix)
	}
	names, err := leftovers(prefix)
	if err != nil {
		return err
	}
	if len(names) > 0 {
		endProcesses(names)
		var gone []string
		for _, name := range names {
			// Also a name that isn't mounted: a lab that was killed between making the file and
			// mounting the namespace leaves one.
			gone = append(gone, "netns delete "+name)
		}
		if err = (*Namespace)(nil).ip(context.Background(), gone...); err != nil {
			err = fmt.Errorf("delete namespaces: %w", err)
		}
	}
	return errors.Join(err, deleteHostLink(Config{Prefix: prefix}.hostLink()))
}

func leftovers(prefix string) ([]string, error) {
	entries, err := os.ReadDir(netnsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	pattern := regexp.MustCompile("^" + regexp.QuoteMeta(prefix) + "-(client|node|b[0-9]+)$")
	var out []string
	for _, e := range entries {
		if pattern.MatchString(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// deleteHostLink removes the link in the caller's namespace. It usually goes
// with the node's namespace, which may be while this asks, but not while a
// process holds that.
func deleteHostLink(name string) error {
	if _, err := net.InterfaceByName(name); err != nil {
		return nil // there is none
	}
	err := (*Namespace)(nil).ip(context.Background(), "link delete "+name)
	if _, gone := net.InterfaceByName(name); gone != nil {
		return nil
	}
	return err
}

// endProcesses sends SIGTERM, and SIGKILL to what is left after termGrace. The
// calling process is spared.
func endProcesses(names []string) {
	signalled := map[int]bool{} // once: a second SIGTERM may mean "at once"
	for deadline := time.Now().Add(termGrace); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		pids := processesIn(names)
		if len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			if !signalled[pid] {
				_ = unix.Kill(pid, unix.SIGTERM) // it may have ended meanwhile
				signalled[pid] = true
			}
		}
	}
	for _, pid := range processesIn(names) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// processesIn lists the processes in the named namespaces.
func processesIn(names []string) (out []int) {
	for _, name := range names {
		text, _ := exec.Command("ip", "netns", "pids", name).Output() // none of one that isn't mounted
		for word := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil && pid != os.Getpid() {
				out = append(out, pid)
			}
		}
	}
	return out
}
