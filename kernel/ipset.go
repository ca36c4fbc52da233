package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/netlink"
)

// IPSets is the [SetStore] over netlink. Its socket belongs to the network
// namespace of the thread that called [OpenIPSets]. It is safe for concurrent
// use; requests go one after the other, as they do in the kernel (nfnl_lock).
//
// The requests are kproxy's own, because those of vishvananda/netlink take one
// entry a message, open a socket for each, and panic when a dump is interrupted.
type IPSets struct {
	mu     sync.Mutex // one request and its answer at a time
	socket *nl.SocketHandle
}

// OpenIPSets opens the socket.
func OpenIPSets() (*IPSets, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open ipset socket: %w", err)
	}
	return &IPSets{socket: &nl.SocketHandle{Socket: s}}, nil
}

// Close closes the socket.
func (s *IPSets) Close() { s.socket.Socket.Close() }

// maxElements is far above the kernel's default of 65536 entries. It bounds a
// set, memory is taken as it fills.
const maxElements = 1 << 20

// batchBytes bounds the entries of one message: netlink attributes have 16 bits
// of length, and a message is copied in one piece.
const batchBytes = 48 << 10

// ipsetListHeader asks LIST for headers only (IPSET_FLAG_LIST_HEADER in
// include/uapi/linux/netfilter/ipset/ip_set.h).
const ipsetListHeader = 1 << 2

// Create implements [SetStore].
func (s *IPSets) Create(set Set) error {
	revision, ok := setRevision[set.Type]
	if !ok {
		return fmt.Errorf("unknown set type %q", set.Type)
	}
	family := set.Family.Number()
	if set.Type == BitmapPort {
		family = unix.AF_UNSPEC
	}
	b := netlink.AppendText(nil, nl.IPSET_ATTR_TYPENAME, string(set.Type))
	b = netlink.Append(b, nl.IPSET_ATTR_REVISION, revision)
	b = netlink.Append(b, nl.IPSET_ATTR_FAMILY, family)
	b = netlink.AppendNested(b, nl.IPSET_ATTR_DATA, func(b []byte) []byte {
		if set.Type != BitmapPort {
			b = appendUint32(b, nl.IPSET_ATTR_MAXELEM, maxElements)
		} else {
			b = netlink.AppendUint16(b, nl.IPSET_ATTR_PORT_FROM|netlink.NetByteOrder, 0)
			b = netlink.AppendUint16(b, nl.IPSET_ATTR_PORT_TO|netlink.NetByteOrder, 0xffff)
		}
		if set.Timeout > 0 {
			b = appendUint32(b, nl.IPSET_ATTR_TIMEOUT, set.Timeout)
		}
		return b
	})
	// Without NLM_F_EXCL an equal set is fine and a different one is refused.
	_, err := s.request(nl.IPSET_CMD_CREATE, set.Name, b)
	return err
}

// setRevision is the first revision of each type that has what kproxy needs
// (net/netfilter/ipset/ip_set_*.c), so that old kernels do.
var setRevision = map[SetType]uint8{BitmapPort: 0, HashIP: 0, HashNet: 0, HashIPPort: 1, HashIPPortIP: 1, HashIPPortNet: 2}

// Destroy implements [SetStore].
func (s *IPSets) Destroy(name string) error {
	_, err := s.request(nl.IPSET_CMD_DESTROY, name, nil)
	return err
}

// Add implements [SetStore].
func (s *IPSets) Add(set Set, timeout uint32, entries ...string) error {
	return s.change(nl.IPSET_CMD_ADD, set, timeout, entries)
}

// Delete implements [SetStore].
func (s *IPSets) Delete(set Set, entries ...string) error {
	return s.change(nl.IPSET_CMD_DEL, set, 0, entries)
}

// change adds or deletes entries, many in a message. Without NLM_F_EXCL the
// kernel passes over those that exist, or don't.
func (s *IPSets) change(cmd int, set Set, timeout uint32, entries []string) error {
	for len(entries) > 0 {
		n := 0
		var err error
		b := netlink.AppendNested(appendUint32(nil, nl.IPSET_ATTR_LINENO, 0), nl.IPSET_ATTR_ADT, func(b []byte) []byte {
			for ; n < len(entries) && len(b) < batchBytes && err == nil; n++ {
				var e AnyEntry
				if e, err = ParseEntry(set.Type, entries[n]); err == nil {
					b = appendEntry(b, &e, timeout)
				}
			}
			return b
		})
		if err != nil {
			return err
		}
		_, err = s.request(cmd, set.Name, b)
		if err != nil {
			if n > 1 {
				return fmt.Errorf("%d entries from %s: %w", n, entries[0], err)
			}
			return fmt.Errorf("entry %s: %w", entries[0], err)
		}
		entries = entries[n:]
	}
	return nil
}

// List implements [SetStore]. A kernel without ip_set has none: its nfnetlink knows no such
// subsystem (nfnetlink_rcv_msg in net/netfilter/nfnetlink.c).
func (s *IPSets) List(entries func(name string) bool) ([]SetState, error) {
	msgs, err := s.request(nl.IPSET_CMD_LIST, "", appendUint32(nil, nl.IPSET_ATTR_FLAGS, ipsetListHeader))
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var out []SetState
	for _, m := range msgs {
		a := AnySet{netmask: -1}
		if err := a.decode(m); err != nil {
			return nil, err
		}
		if Own(a.Name) {
			out = append(out, SetState{Set: Set{Name: a.Name, Type: SetType(a.Type), Family: a.Family, Timeout: a.timeout}, Count: a.count})
		}
	}
	slices.SortFunc(out, func(a, b SetState) int { return strings.Compare(a.Name, b.Name) })
	kept := out[:0]
	for _, st := range out {
		// Most sets are empty, and the kernel walks all places for entries that a set
		// has, 65,536 of a bitmap.
		if entries != nil && entries(st.Name) && st.Count != 0 {
			err := s.listEntries(&st)
			if errors.Is(err, ErrNotFound) {
				continue // destroyed in the meantime
			}
			if err != nil {
				return nil, err
			}
		}
		kept = append(kept, st)
	}
	return kept, nil
}

func (s *IPSets) listEntries(st *SetState) error {
	msgs, err := s.request(nl.IPSET_CMD_LIST, st.Name, nil)
	if err != nil {
		return err
	}
	type entry struct {
		text      string
		remaining uint32
	}
	var all []entry
	a := AnySet{netmask: -1}
	for _, m := range msgs {
		a.Entries = a.Entries[:0]
		if err := a.decode(m); err != nil {
			return err
		}
		for i := range a.Entries {
			all = append(all, entry{a.Entries[i].Text(st.Type), a.Entries[i].Remaining})
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.text, b.text) })
	for _, e := range all {
		if st.Entries = append(st.Entries, e.text); a.Timed {
			st.Remaining = append(st.Remaining, e.remaining)
		}
	}
	return nil
}

// request sends a command about a set, or all of them, and returns the answers.
func (s *IPSets) request(cmd int, name string, attrs []byte) ([][]byte, error) {
	if name != "" && !Own(name) {
		return nil, fmt.Errorf("set %q isn't kproxy's", name)
	}
	return s.exchange(cmd, name, attrs)
}

// exchange is request for a set of anybody's.
func (s *IPSets) exchange(cmd int, name string, attrs []byte) ([][]byte, error) {
	flags := nl.GetIpsetFlags(cmd)
	if cmd == nl.IPSET_CMD_DESTROY {
		flags |= unix.NLM_F_EXCL // since Linux 5.10 a missing set is no error without it
	}
	req := nl.NewNetlinkRequest(cmd|unix.NFNL_SUBSYS_IPSET<<8, flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	b := netlink.Append(nil, nl.IPSET_ATTR_PROTOCOL, nl.IPSET_PROTOCOL)
	if name != "" {
		b = netlink.AppendText(b, nl.IPSET_ATTR_SETNAME, name)
	}
	req.AddRawData(append(b, attrs...))
	s.mu.Lock()
	defer s.mu.Unlock()
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: s.socket}
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	return msgs, classifySet(err)
}

// classifySet gives ipset's errors their meaning (ip_set.h, enum ipset_errno).
func classifySet(err error) error {
	var errno syscall.Errno
	if err == nil || !errors.As(err, &errno) {
		return err
	}
	switch {
	case errno == unix.ENOENT:
		return fmt.Errorf("%w: no such set", ErrNotFound)
	case errno == unix.EPERM:
		return fmt.Errorf("%w: CAP_NET_ADMIN is needed", ErrPermission)
	case int(errno) == nl.IPSET_ERR_BUSY || int(errno) == nl.IPSET_ERR_REFERENCED:
		return ErrBusy
	case errno == unix.EEXIST:
		return errors.New("a set of this name and another type exists")
	case int(errno) == nl.IPSET_ERR_FIND_TYPE:
		return fmt.Errorf("%w: the kernel doesn't know this set type", ErrNotFound)
	case int(errno) >= nl.IPSET_ERR_TYPE_SPECIFIC:
		return errors.New("the set is full or doesn't take this entry")
	case int(errno) >= nl.IPSET_ERR_PRIVATE:
		return nl.IPSetError(errno)
	}
	return err
}
