package ipvs

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

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
