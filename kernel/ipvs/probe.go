package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// The scratch virtual server that schedulers are tried with: on an address that
// nobody has (RFC 5737), as upstream's, and with a persistence that tells it from
// others', so that one which a killed kproxy left is known for what it is.
const (
	scratchPort        = 20000
	scratchPorts       = 64 // to try, in case that they are taken
	scratchPersistence = 10249
)

var scratchAddress = netip.MustParseAddr("198.51.100.0")

func scratch(port int) kernel.Virtual {
	return kernel.Virtual{
		Protocol: service.TCP, Address: netip.AddrPortFrom(scratchAddress, uint16(port)),
		Persistence: scratchPersistence,
	}
}

// isScratch reports whether s is a scratch virtual server.
func isScratch(s Server) bool {
	return s.Protocol == service.TCP && s.Address.Addr() == scratchAddress && s.Address.Port() >= scratchPort &&
		s.Persistence == scratchPersistence && len(s.Reals) == 0
}

// loadFirst are the schedulers whose modules wait for network namespaces that are being removed (register_pernet_subsys in
// ip_vs_lblc.c), as those do for IPVS's mutex (ip_vs_service_nets_cleanup). The kernel holds that while it loads a scheduler's module
// (ip_vs_add_service): then neither goes on, no namespace can be made any more, and IPVS takes no request, until kproxy is killed.
var loadFirst = []string{"lblc", "lblcr"}

// ProbeSchedulers tries schedulers and returns why they can't be used, empty for
// those that can, as [plan.Caps] has it. The kernel loads their modules, but those of loadFirst if there is a modprobe.
func ProbeSchedulers(ctx context.Context, t Table, names []string) (map[string]string, error) {
	if err := removeScratch(t); err != nil {
		return nil, err
	}
	out := make(map[string]string, len(names))
	port := scratchPort
	for _, scheduler := range names {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if slices.Contains(loadFirst, scheduler) {
			_, _ = (kernel.Exec{}).Run(ctx, nil, "modprobe", "--quiet", "ip_vs_"+scheduler) // else the kernel does
		}
		v, err := tryScheduler(t, &port, scheduler)
		switch {
		case errors.Is(err, ErrScheduler):
			out[scheduler] = fmt.Sprintf("the kernel has no scheduler %s: kernel option CONFIG_IP_VS_*, or the kernel's module ip_vs_%s", scheduler, scheduler)
			continue
		case err != nil:
			return nil, fmt.Errorf("try scheduler %s: %w", scheduler, err)
		}
		if err := one(t, Request{Do: Delete, Virtual: v}); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			return nil, fmt.Errorf("try scheduler %s: %w", scheduler, err)
		}
		out[scheduler] = ""
	}
	return out, nil
}

// tryScheduler makes a scratch virtual server at the first port from *port on
// that is free.
func tryScheduler(t Table, port *int, scheduler string) (kernel.Virtual, error) {
	for ; ; *port++ {
		v := scratch(*port)
		v.Scheduler = scheduler
		err := one(t, Request{Do: Add, Virtual: v})
		if !errors.Is(err, ErrExists) || *port >= scratchPort+scratchPorts {
			return v, err
		}
	}
}

// removeScratch removes what a killed kproxy left.
func removeScratch(t Table) error {
	all, err := t.List()
	if err != nil {
		return err
	}
	for _, s := range all {
		if !isScratch(s) {
			continue
		}
		if err := one(t, Request{Do: Delete, Virtual: s.Virtual}); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			return fmt.Errorf("remove a scratch virtual server: %w", err)
		}
	}
	return nil
}

// Probe finds out whether IPVS can be used: that it is in the kernel, whose module
// is loaded if need be, that its table can be changed, that conntrack sees its
// flows, and that there are dummy links; and which of the schedulers named can
// be. It works in the network namespace of the calling thread and leaves nothing
// there. The error is only about ctx.
func Probe(ctx context.Context, names []string) (plan.Capability, map[string]string, error) {
	c := plan.Capability{Name: "ipvs"}
	if err := Load(); err != nil {
		c.Reason = fmt.Sprintf("%v; it takes the kernel option CONFIG_IP_VS, or the kernel's module ip_vs", err)
		return c, nil, ctx.Err()
	}
	table, err := OpenTable()
	if err != nil {
		c.Reason = err.Error()
		return c, nil, ctx.Err()
	}
	defer table.Close()
	schedulers, err := ProbeSchedulers(ctx, table, names)
	if ctx.Err() != nil {
		return c, nil, ctx.Err()
	}
	if err == nil {
		err = probeConntrack()
	}
	if err == nil {
		err = probeLink()
	}
	if err == nil && schedulers["rr"] != "" {
		err = errors.New(schedulers["rr"])
	}
	if err != nil {
		c.Reason = err.Error()
		return c, schedulers, nil
	}
	c.Supported, c.Reason = true, "virtual servers and dummy links work"
	return c, schedulers, nil
}

// probeConntrack looks for the setting that makes IPVS tell conntrack of its
// flows: without it none could be masqueraded or marked.
func probeConntrack() error {
	if _, err := os.Stat("/proc/sys/net/ipv4/vs/conntrack"); err != nil {
		return fmt.Errorf("%w: kernel option CONFIG_IP_VS_NFCT", err)
	}
	return nil
}

// moduleWait bounds the loading of a module.
const moduleWait = 10 * time.Second

// Load makes sure that IPVS is in the kernel, and loads its module if need be.
func Load() error {
	// The kernel loads the module itself when it is asked for a netlink family
	// that it doesn't have (ctrl_getfamily), also for a container, which has neither
	// the modules nor modprobe. An ip_vs without that alias is loaded by name.
	_, err := netlink.GenlFamilyGet("IPVS")
	if err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), moduleWait)
	defer cancel()
	if _, loadErr := (kernel.Exec{}).Run(ctx, nil, "modprobe", "ip_vs"); loadErr != nil {
		why := loadErr.Error()
		if e := (*kernel.ExecError)(nil); errors.As(loadErr, &e) && e.Stderr != "" {
			why = strings.TrimPrefix(e.Stderr, "modprobe: FATAL: ")
		}
		return fmt.Errorf("the kernel has none, and modprobe fails (%s)", strings.TrimSuffix(why, "."))
	}
	if _, err = netlink.GenlFamilyGet("IPVS"); err != nil {
		return fmt.Errorf("module ip_vs is loaded, but not for this namespace (%w)", err)
	}
	return nil
}

// Look finds out whether IPVS can be used, and doesn't have the kernel load it, as asking
// for its netlink family would.
func Look(ctx context.Context) plan.Capability {
	c := plan.Capability{Name: "ipvs"}
	if Loaded() {
		c, _, err := Probe(ctx, nil)
		if err != nil {
			c.Reason = err.Error()
		}
		return c
	}
	if _, err := (kernel.Exec{}).Run(ctx, nil, "modprobe", "--dry-run", "--quiet", "ip_vs"); err != nil {
		c.Reason = "the kernel has none, and modprobe finds no module of it; it takes the kernel option CONFIG_IP_VS, or the kernel's module ip_vs"
		return c
	}
	c.Supported, c.Reason = true, "the kernel's module ip_vs can be loaded"
	return c
}
