package nftables

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// flowtable is where the kernel keeps established connections to endpoints. Their packets go from one
// device to another where they come in, and pass no rule: neither kproxy's nor others'.
const flowtable = "established"

// Attributes of linux/netfilter/nf_tables.h that x/sys/unix doesn't have.
const (
	flowtableName         = 2 // NFTA_FLOWTABLE_*
	flowtableHook         = 3
	flowtableFlags        = 7
	flowtableHookPriority = 2 // NFTA_FLOWTABLE_HOOK_*
	flowtableHookNumber   = 1
	flowtableHookDevices  = 3
	flowtableCounter      = 2 // NFT_FLOWTABLE_COUNTER: conntrack counts on
	deviceName            = 1 // NFTA_DEVICE_NAME
	flowAddTable          = 1 // NFTA_FLOW_TABLE_NAME
)

// devicesAtMost is how many devices the kernel takes in one request (NFT_NETDEVICE_MAX is 256).
const devicesAtMost = 200

// newFlowtable makes the flowtable, if there is none, and adds devices that it hasn't.
func newFlowtable(f service.Family, devices ...string) []byte {
	return message(unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, f, func(b []byte) []byte {
		b = netlink.AppendText(b, flowtableName, flowtable)
		b = netlink.AppendUint32(b, flowtableFlags, flowtableCounter)
		return netlink.AppendNested(b, flowtableHook, func(b []byte) []byte {
			b = netlink.AppendUint32(b, flowtableHookNumber, unix.NF_NETDEV_INGRESS)
			b = netlink.AppendUint32(b, flowtableHookPriority, 0)
			if len(devices) == 0 {
				return b
			}
			return netlink.AppendNested(b, flowtableHookDevices, func(b []byte) []byte {
				for _, d := range devices {
					b = netlink.AppendText(b, deviceName, d)
				}
				return b
			})
		})
	})
}

func deleteFlowtable(f service.Family) []byte {
	return message(unix.NFT_MSG_DELFLOWTABLE, 0, f, func(b []byte) []byte { return netlink.AppendText(b, flowtableName, flowtable) })
}

// flowAdd has the connection's packets go by the flowtable from now on: of TCP while it is
// established, and of UDP.
func flowAdd(r *Rule) {
	r.say("flow add @%s", flowtable)
	r.Add("flow_offload", func(b []byte) []byte { return netlink.AppendText(b, flowAddTable, flowtable) })
}

// flowtableText is the flowtable as nft lists it, without its devices.
func flowtableText() string {
	return fmt.Sprintf("\tflowtable %s {\n\t\thook ingress priority filter\n\t\tcounter\n\t}\n", flowtable)
}

// followDevices adds to the flowtables the devices that came up. Those that go leave by themselves;
// connections by a device that isn't there take the usual way, so one that the kernel refuses is
// left out, and told of once, by the next Check.
func (t *tables) followDevices() error {
	all, err := net.Interfaces()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	now, come := map[string]int{}, []string(nil)
	for _, d := range all {
		if d.Flags&net.FlagUp == 0 || d.Flags&net.FlagLoopback != 0 {
			continue
		}
		if now[d.Name] = d.Index; t.devices[d.Name] != d.Index {
			come = append(come, d.Name)
		}
	}
	slices.Sort(come)
	err = t.addDevices(slices.Collect(slices.Chunk(come, devicesAtMost))...)
	if errors.As(err, new(*refusal)) && !errors.Is(err, unix.ENOENT) {
		err = nil
		for _, d := range come {
			switch alone := t.addDevices([]string{d}); {
			case errors.Is(alone, unix.ENOENT):
				delete(now, d)
			case errors.As(alone, new(*refusal)):
				t.unfollowed = errors.Join(t.unfollowed, fmt.Errorf("the flowtables go without device %s: %w", d, alone))
			default:
				err = errors.Join(err, alone)
			}
		}
	}
	switch {
	case errors.Is(err, unix.ENOENT): // one has gone meanwhile; the next look finds the others
		return nil
	case err != nil:
		return fmt.Errorf("follow devices: %w", err)
	}
	t.devices = now
	return nil
}

// addDevices adds devices to the flowtables, all or none.
func (t *tables) addDevices(some ...[]string) error {
	var requests [][]byte
	for _, devices := range some {
		for _, f := range t.families {
			requests = append(requests, newFlowtable(f, devices...))
		}
	}
	return t.commit(requests)
}
