package ipvs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nlmsg"
)

// ErrSyncDaemon says that another program has the kernel's synchronisation daemon
// at work, of which there is one per network namespace.
var ErrSyncDaemon = errors.New("the connections of this node's IPVS are being synchronised with other load balancers' (ipvsadm --daemon)")

// syncLink is the name of the loopback link, which is the same in every network
// namespace.
const syncLink = "lo"

// syncDaemon is the receiving end of IPVS's synchronisation, in the role of the
// backup, and a socket that plays the master.
type syncDaemon struct {
	table  *Netlink
	id     uint8 // whose messages it takes
	socket int
}

// startSync starts the daemon in the network namespace of the calling thread. One
// that an earlier kproxy left is replaced.
func (t *Netlink) startSync(mark uint32) (*syncDaemon, error) {
	// A backup that only listens would direct no traffic at all (ip_vs_in).
	if n, _ := kernel.ReadSysctl("net", "ipv4", "vs", "backup_only"); n != 0 {
		return nil, fmt.Errorf("%w: net.ipv4.vs.backup_only is set", ErrSyncDaemon)
	}
	if err := t.StopSync(); err != nil {
		return nil, err
	}
	d := &syncDaemon{table: t, id: uint8(1 + rand.IntN(255))} // 0 would be all
	if err := t.startBackup(d.id); err != nil {
		return nil, fmt.Errorf("start synchronisation daemon: %w", err)
	}
	var err error
	if d.socket, err = syncSocket(mark); err != nil {
		return nil, errors.Join(fmt.Errorf("open synchronisation socket: %w", err), t.stopBackup())
	}
	return d, nil
}

// StopSync stops the daemon that a process left which ended while it seeded affinity.
// Another's goes on, and is an [ErrSyncDaemon].
func (t *Netlink) StopSync() error {
	daemons, err := t.syncDaemons()
	if err != nil {
		return err
	}
	for _, own := range daemons {
		if !own {
			return ErrSyncDaemon
		}
		if err := t.stopBackup(); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

// stop ends the daemon, after what it has received.
func (d *syncDaemon) stop() error {
	return errors.Join(os.NewSyscallError("close", unix.Close(d.socket)), d.table.stopBackup())
}

// syncSocket sends to [SyncGroup] on the loopback link.
func syncSocket(mark uint32) (int, error) {
	lo, err := net.InterfaceByName(syncLink)
	if err != nil {
		return 0, err
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	for _, set := range []func() error{
		func() error { return unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_MARK, int(mark)) },
		func() error {
			return unix.SetsockoptIPMreqn(s, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, &unix.IPMreqn{Ifindex: int32(lo.Index)})
		},
		func() error { return unix.SetsockoptInt(s, unix.IPPROTO_IP, unix.IP_MULTICAST_TTL, 0) },
	} {
		if err := set(); err != nil {
			unix.Close(s)
			return 0, os.NewSyscallError("setsockopt", err)
		}
	}
	return s, nil
}

// syncBurst is how many messages the daemon's socket takes at a time, of the
// size that it has by default (net.core.rmem_default) and with room to spare.
const syncBurst = 4

// send sends seeds and waits until the daemon has taken them.
func (d *syncDaemon) send(ctx context.Context, s []seed) error {
	to := &unix.SockaddrInet4{Addr: SyncGroup.Addr().As4(), Port: int(SyncGroup.Port())}
	for n := 1; len(s) > 0; n++ {
		part := s[:min(len(s), syncMost)]
		s = s[len(part):]
		if err := unix.Sendto(d.socket, syncMessage(d.id, part), 0, to); err != nil {
			return os.NewSyscallError("sendto", err)
		}
		if n%syncBurst != 0 && len(s) > 0 {
			continue
		}
		if err := d.drained(ctx); err != nil {
			return err
		}
	}
	return nil
}

const (
	// sockets are those for UDP in the calling thread's network namespace.
	sockets = "/proc/thread-self/net/udp"
	// drainPatience is far longer than the daemon needs.
	drainPatience = 5 * time.Second
)

// drained waits until nothing waits for the daemon.
func (d *syncDaemon) drained(ctx context.Context) error {
	group := SyncGroup.Addr().As4()
	address := []byte(fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(group[:]), SyncGroup.Port()))
	for waited := time.Duration(0); waited < drainPatience; waited += time.Millisecond {
		b, err := os.ReadFile(sockets)
		if err != nil {
			return err
		}
		// "sl local_address rem_address st tx_queue:rx_queue …" (udp4_format_sock)
		if i := bytes.Index(b, address); i < 0 {
			return errors.New("the synchronisation daemon has ended")
		} else if f := bytes.Fields(b[i:]); len(f) < 4 || bytes.HasSuffix(f[3], []byte(":00000000")) {
			return nil
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
	return errors.New("the synchronisation daemon doesn't take what it is sent")
}

// syncMost is the most connections that a message can count.
const syncMost = 255

// Layout of messages of version 1 (ip_vs_sync.c: struct ip_vs_sync_mesg,
// ip_vs_sync_v4 and ip_vs_sync_v6), all in network order.
const (
	syncVersion       = 1
	syncHeaderLength  = 8
	syncV4Length      = 36
	syncV6Length      = 72
	syncIPv6          = 1      // STYPE_F_INET6
	syncTemplate      = 0x1000 // IP_VS_CONN_F_TEMPLATE; forwarding by NAT is 0
	syncTemplateState = 1      // IP_VS_CTPL_S_ASSURED: it isn't dropped first
)

// syncMessage encodes seeds, at most syncMost.
func syncMessage(id uint8, s []seed) []byte {
	b := make([]byte, syncHeaderLength, syncHeaderLength+len(s)*syncV6Length)
	for _, s := range s {
		b = appendSeed(b, s)
	}
	b[1] = id
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	b[4], b[5] = uint8(len(s)), syncVersion
	return b
}

func appendSeed(b []byte, s seed) []byte {
	typ, length := byte(0), uint16(syncV4Length)
	if s.client.Is6() {
		typ, length = syncIPv6, syncV6Length
	}
	b = append(b, typ, byte(s.protocol))
	b = binary.BigEndian.AppendUint16(b, length) // the entry's version, 0, is in its upper bits
	b = binary.BigEndian.AppendUint32(b, syncTemplate)
	for _, v := range []uint16{syncTemplateState, 0, s.address.Port(), s.real.Port()} {
		b = binary.BigEndian.AppendUint16(b, v)
	}
	b = binary.BigEndian.AppendUint32(b, 0) // no firewall mark
	b = binary.BigEndian.AppendUint32(b, s.timeout)
	for _, a := range []netip.Addr{s.client, s.address.Addr(), s.real.Addr()} {
		b = append(b, a.AsSlice()...)
	}
	return b
}

// Generic netlink's commands and attributes of daemons (linux/ip_vs.h).
const (
	cmdNewDaemon = 9
	cmdDelDaemon = 10
	cmdGetDaemon = 11

	attrDaemon = 3 // of a command

	daemonState     = 1
	daemonLink      = 2
	daemonSyncID    = 3
	daemonMaxLength = 4
	daemonGroup     = 5
	daemonPort      = 7

	stateBackup = 2

	sizeofGeneric = 4 // struct genlmsghdr
)

// onDaemon sends a command about a daemon, and the same again as often as times says.
func (t *Netlink) onDaemon(command byte, times int, attributes func([]byte) []byte) []error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changes.Change(times, func(b []byte, _ int) []byte {
		return nlmsg.AppendNested(append(nlmsg.AppendRequest(b, t.family, 0), command, 1, 0, 0), attrDaemon, attributes) // version 1
	})
}

func (t *Netlink) startBackup(id uint8) error {
	err := t.onDaemon(cmdNewDaemon, 1, func(b []byte) []byte {
		b = nlmsg.AppendNative(b, daemonState, stateBackup)
		b = nlmsg.AppendText(b, daemonLink, syncLink)
		b = nlmsg.AppendNative(b, daemonSyncID, uint32(id))
		b = nlmsg.Append(b, daemonMaxLength, binary.NativeEndian.AppendUint16(nil, syncHeaderLength+syncMost*syncV6Length)...)
		b = nlmsg.AppendAddr(b, daemonGroup, SyncGroup.Addr())
		return nlmsg.Append(b, daemonPort, binary.NativeEndian.AppendUint16(nil, SyncGroup.Port())...)
	})[0]
	if errors.Is(err, unix.EEXIST) {
		return ErrSyncDaemon
	}
	return err
}

// stopBackup stops the backup. It fails with ESRCH if there is none.
//
// The kernel doesn't answer a request that ends with EINTR (netlink_rcv_skb in
// net/netlink/af_netlink.c), and so ends one that stops a thread before it has run
// (kthread_stop), as happens to a daemon that has just been started. So it is asked
// twice at once, and the second answer, that there is none, always comes.
func (t *Netlink) stopBackup() error {
	errs := t.onDaemon(cmdDelDaemon, 2, func(b []byte) []byte { return nlmsg.AppendNative(b, daemonState, stateBackup) })
	err := errs[0]
	if err == nil && !errors.Is(errs[1], unix.ESRCH) {
		err = errs[1]
	}
	if err != nil {
		return fmt.Errorf("stop synchronisation daemon: %w", err)
	}
	return nil
}

// syncDaemons lists the daemons that the kernel runs, a master, a backup, both or none, and
// tells of each whether it is kproxy's.
func (t *Netlink) syncDaemons() (own []bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = t.changes.Dump(func(b []byte) []byte {
		return append(nlmsg.AppendRequest(b, t.family, unix.NLM_F_DUMP), cmdGetDaemon, 1, 0, 0) // version 1
	}, func(body []byte) {
		for typ, value := range nlmsg.Attributes(body[min(len(body), sizeofGeneric):]) {
			if typ == attrDaemon {
				own = append(own, isOwnDaemon(value))
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list synchronisation daemons: %w", err)
	}
	return own, nil
}

func isOwnDaemon(attributes []byte) bool {
	var backup, here, group bool
	for typ, value := range nlmsg.Attributes(attributes) {
		switch typ {
		case daemonState:
			backup = len(value) == 4 && binary.NativeEndian.Uint32(value) == stateBackup
		case daemonLink:
			here = nlmsg.Text(value) == syncLink
		case daemonGroup:
			a, ok := netip.AddrFromSlice(value)
			group = ok && a == SyncGroup.Addr()
		}
	}
	return backup && here && group
}
