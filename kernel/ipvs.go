package kernel

import (
	"context"
	"fmt"
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
		return fmt.Errorf("no generic netlink family IPVS (%w), and %v", err, loadErr)
	}
	if _, err = netlink.GenlFamilyGet("IPVS"); err != nil {
		return fmt.Errorf("no generic netlink family IPVS (%w)", err)
	}
	return nil
}
