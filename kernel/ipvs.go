package kernel

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
)

// moduleWait bounds the loading of a module.
const moduleWait = 10 * time.Second

// LoadIPVS makes sure that IPVS is in the kernel, and loads its module if need be.
func LoadIPVS() error {
	// The kernel loads the module itself when it is asked for a netlink family
	// that it doesn't have (ctrl_getfamily), also for a container, which has neither
	// the modules nor modprobe. An ip_vs without that alias is loaded by name.
	_, err := netlink.GenlFamilyGet("IPVS")
	if err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), moduleWait)
	defer cancel()
	if _, loadErr := (Exec{}).Run(ctx, nil, "modprobe", "ip_vs"); loadErr != nil {
		why := loadErr.Error()
		if e := (*ExecError)(nil); errors.As(loadErr, &e) && e.Stderr != "" {
			why = strings.TrimPrefix(e.Stderr, "modprobe: FATAL: ")
		}
		return fmt.Errorf("the kernel has none, and modprobe fails (%s)", strings.TrimSuffix(why, "."))
	}
	if _, err = netlink.GenlFamilyGet("IPVS"); err != nil {
		return fmt.Errorf("module ip_vs is loaded, but not for this namespace (%w)", err)
	}
	return nil
}
