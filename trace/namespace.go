package trace

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
)

// netnsDir is where ip netns and container runtimes keep namespaces.
const netnsDir = "/run/netns"

// space is another network namespace of this host.
type space struct {
	path  string // opens it
	inode uint64 // tells it from others
	pid   int    // a process in it; 0 if none is known
}

// ownSpace is the network namespace of the calling thread.
const ownSpace = "/proc/thread-self/ns/net"

func inodeOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Ino, nil
}

// spaces are the network namespaces of this host but the calling thread's own, as
// far as this process may see them: those with a name, and those of processes.
func spaces() []space {
	own, _ := inodeOf(ownSpace)
	at := map[uint64]int{}
	var out []space
	add := func(s space) {
		if i, known := at[s.inode]; known && out[i].pid == 0 {
			out[i].pid = s.pid
		} else if !known && s.inode != own {
			at[s.inode] = len(out)
			out = append(out, s)
		}
	}
	named, _ := os.ReadDir(netnsDir)
	for _, e := range named {
		path := filepath.Join(netnsDir, e.Name())
		if inode, err := inodeOf(path); err == nil {
			add(space{path: path, inode: inode})
		}
	}
	processes, _ := os.ReadDir("/proc")
	for _, e := range processes {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		path := "/proc/" + e.Name() + "/ns/net"
		if inode, err := inodeOf(path); err == nil {
			add(space{path, inode, pid})
		}
	}
	return out
}

// spaceName says which network namespace the calling thread is in.
func spaceName() string {
	own, err := inodeOf(ownSpace)
	if err != nil {
		return ""
	}
	named, _ := os.ReadDir(netnsDir)
	for _, e := range named {
		if inode, err := inodeOf(filepath.Join(netnsDir, e.Name())); err == nil && inode == own {
			return filepath.Join(netnsDir, e.Name())
		}
	}
	if first, err := inodeOf("/proc/1/ns/net"); err == nil && first == own {
		return "this host's own (that of process 1)"
	}
	return fmt.Sprintf("net:[%d], which has no name", own)
}

// onThread runs f on a thread of its own that ends with it, so that f may change
// the thread's namespaces. Sockets that f opens stay where they were opened.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the runtime ends the thread
		if unix.Gettid() == unix.Getpid() {
			// The main thread can't be ended, and its namespaces are those that /proc shows
			// of the process; locked, it isn't used for the goroutine that f gets instead.
			defer runtime.UnlockOSThread()
			done <- onThread(f)
			return
		}
		done <- f()
	}()
	return <-done
}

// enter moves the calling thread to a namespace.
func enter(path string, kind int) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, kind); err != nil {
		return fmt.Errorf("enter namespace %s: %w", path, err)
	}
	return nil
}

// inside runs f in the network namespace at path.
func inside(path string, f func() error) error {
	return onThread(func() error {
		if err := enter(path, unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// guest is a pod, or whatever else has an address in another network namespace of
// this host that one link joins with the traced one.
type guest struct {
	path     string
	link     string   // that has the address
	peer     string   // the traced namespace's end of it
	by       string   // what packets for it leave by: peer, or the bridge that peer is a port of
	veth     bool     // link is one end of a pair, and nobody else is on it
	forwards bool     // packets for others
	mtu      int      // of link
	macs     []string // of all its links
}

// neighbourhood is who is seen in other network namespaces.
type neighbourhood struct {
	at     map[netip.Addr]guest
	behind map[string]guest // by the traced namespace's end of a veth
}

// neighbours are all guests. Addresses alone don't tell: several networks of one host may use
// the same, so that the link's other end has to be in the calling thread's namespace.
func neighbours() (neighbourhood, error) {
	out := neighbourhood{at: map[netip.Addr]guest{}, behind: map[string]guest{}}
	here, err := unix.Open(ownSpace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return out, &os.PathError{Op: "open", Path: ownSpace, Err: err}
	}
	defer unix.Close(here)
	links, err := netlink.LinkList()
	if err != nil {
		return out, fmt.Errorf("list links: %w", err)
	}
	names, masters := map[int]string{}, map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, l := range links {
		a := l.Attrs()
		masters[a.Index] = cmp.Or(names[a.MasterIndex], a.Name)
	}
	all := spaces()
	err = onThread(func() error {
		for _, s := range all {
			if enter(s.path, unix.CLONE_NEWNET) == nil {
				out.add(s, here, names, masters)
			}
		}
		return nil
	})
	return out, err
}

// add adds those of the calling thread's namespace, s, whose links lead to the namespace
// here, where links have names and masters by index.
func (n *neighbourhood) add(s space, here int, names, masters map[int]string) {
	id, err := netlink.GetNetNsIdByFd(here)
	if err != nil || id < 0 {
		return // no link of it leads there
	}
	links, err := netlink.LinkList()
	if err != nil {
		return
	}
	var macs []string
	for _, l := range links {
		macs = append(macs, l.Attrs().HardwareAddr.String())
	}
	for _, l := range links {
		a := l.Attrs()
		if a.NetNsID != id || a.ParentIndex == 0 {
			continue
		}
		forwarding, _ := sysctl("net", "ipv4", "ip_forward")
		g := guest{
			path: s.path, link: a.Name, peer: names[a.ParentIndex], by: masters[a.ParentIndex], veth: l.Type() == "veth",
			forwards: forwarding != 0, mtu: a.MTU, macs: macs,
		}
		if g.veth {
			n.behind[g.peer] = g
		}
		addrs, _ := netlink.AddrList(l, netlink.FAMILY_ALL)
		for _, x := range addrs {
			if at := addrOf(x.IP); !at.IsLinkLocalUnicast() {
				n.at[at] = g
			}
		}
	}
}

// listens reports whether a socket of the guest's waits at an address.
func (g *guest) listens(p service.Protocol, a netip.AddrPort) (ok bool, err error) {
	err = inside(g.path, func() (err error) {
		_, ok, err = listenerFor(p, a)
		return err
	})
	return ok, err
}

// routeTo asks for the guest's route.
func (g *guest) routeTo(q query) (r route, err error) {
	err = inside(g.path, func() error {
		r = askRoute(q)
		return nil
	})
	return r, err
}

// errNoPod is that no process seen has the host name.
var errNoPod = errors.New("there is no such pod on this node, as far as this process may see")

// podSpace returns the network namespace of a pod: the host name of its processes is the pod's
// (unless spec.hostname or spec.hostNetwork says otherwise).
func podSpace(pod string) (string, error) {
	var found []string
	all := spaces()
	err := onThread(func() error {
		for _, s := range all {
			var u unix.Utsname
			if s.pid == 0 || enter(fmt.Sprintf("/proc/%d/ns/uts", s.pid), unix.CLONE_NEWUTS) != nil || unix.Uname(&u) != nil {
				continue
			}
			if unix.ByteSliceToString(u.Nodename[:]) == pod {
				found = append(found, s.path)
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return "", err
	case len(found) == 0:
		return "", fmt.Errorf("find pod %s: %w; pass the path of its network namespace (--netns)", pod, errNoPod)
	case len(found) > 1:
		slices.Sort(found)
		return "", fmt.Errorf("find pod %s: several namespaces have that host name; pass one of %s (--netns)", pod, strings.Join(found, ", "))
	}
	return found[0], nil
}
