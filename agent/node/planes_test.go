package node

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// TestAutoChooses: mode auto prefers nftables, unless a firewall or a scheduler speaks against it and
// iptables works; it doesn't pass over what this process isn't permitted.
func TestAutoChooses(t *testing.T) {
	var (
		fine       = kernel.Facts{}
		firewalled = kernel.Facts{Dropping: []string{"chain FORWARD drops", "chain INPUT drops"}}
		none       = kernel.Facts{Missing: &kernel.Missing{What: "it"}}
		denied     = kernel.Facts{Missing: kernel.NoPermission(kernel.ErrPermission)}
	)
	for name, tt := range map[string]struct {
		mode      plan.Mode
		scheduler string
		facts     map[plan.DataPlane]kernel.Facts // by a plane of each driver; IPVS's: the host has it
		want      plan.DataPlane
		why       string // why not others
		missing   error
	}{
		"all":                          {plan.ModeAuto, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: fine, plan.IPTables: fine}, plan.NFTables, "", nil},
		"no iptables":                  {plan.ModeAuto, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: fine, plan.IPTables: none}, plan.NFTables, "", nil},
		"no nftables":                  {plan.ModeAuto, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: none, plan.IPTables: fine}, plan.IPTables, "nftables isn't used: this host lacks it", nil},
		"firewall":                     {plan.ModeAuto, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: firewalled, plan.IPTables: fine}, plan.IPTables, "nftables isn't used: chain FORWARD drops, and 1 more", nil},
		"firewall, no iptables":        {plan.ModeAuto, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: firewalled, plan.IPTables: none}, plan.NFTables, "", nil},
		"scheduler":                    {plan.ModeAuto, "lc", map[plan.DataPlane]kernel.Facts{plan.NFTables: fine, plan.IPVS: fine}, plan.IPTables, "no scheduler lc", nil},
		"scheduler, no IPVS":           {plan.ModeAuto, "lc", map[plan.DataPlane]kernel.Facts{plan.NFTables: fine, plan.IPTables: fine}, plan.NFTables, "", nil},
		"scheduler, firewall, no IPVS": {plan.ModeAuto, "lc", map[plan.DataPlane]kernel.Facts{plan.NFTables: firewalled, plan.IPTables: fine}, plan.IPTables, "chain FORWARD drops", nil},
		"scheduler, no iptables":       {plan.ModeAuto, "lc", map[plan.DataPlane]kernel.Facts{plan.NFTables: fine, plan.IPTables: none}, plan.NFTables, "", nil},
		"denied":                       {plan.ModeAuto, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: denied, plan.IPTables: fine}, plan.NFTables, "", kernel.ErrPermission},
		"firewall, iptables denied":    {plan.ModeAuto, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: firewalled, plan.IPTables: denied}, plan.IPTables, "chain FORWARD drops", kernel.ErrPermission},
		"nftables whatever drops":      {plan.ModeNFTables, "lc", map[plan.DataPlane]kernel.Facts{plan.NFTables: firewalled, plan.IPTables: fine}, plan.NFTables, "", nil},
		"userspace":                    {plan.ModeUserspace, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: fine, plan.IPTables: fine}, plan.IPTables, "", nil},
		"userspace, no iptables":       {plan.ModeUserspace, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: firewalled, plan.IPTables: none}, plan.NFTables, "", nil},
		"iptables where there is none": {plan.ModeIPTables, "", map[plan.DataPlane]kernel.Facts{plan.NFTables: fine, plan.IPTables: none}, plan.IPTables, "", none.Missing},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := DriversOf(config.Default()).Choose(tt.mode, tt.scheduler, func(d kernel.Driver) (kernel.Facts, error) {
				for plane, facts := range tt.facts {
					if has(d, plane) {
						if plane == plan.IPVS {
							d.Assume()
						}
						return facts, nil
					}
				}
				return none, nil
			})
			if err != nil || !has(f.Driver, tt.want) || !errors.Is(f.Missing, tt.missing) || !strings.Contains(f.PassedOver, tt.why) || tt.why == "" && f.PassedOver != "" {
				t.Errorf("%+v, passed over because %q; want that of %s, because %q, missing %v (%v)", f.Facts, f.PassedOver, tt.want, tt.why, tt.missing, err)
			}
			if tt.why != "" && !slices.ContainsFunc(f.Capabilities, func(c plan.Capability) bool {
				return c.Name == string(plan.NFTables) && !c.Supported && c.Reason != ""
			}) {
				t.Errorf("capabilities are %+v, want nftables and why not", f.Capabilities)
			}
		})
	}
}

// TestAutoChoosesNothing: where nothing works, every lack is told.
func TestAutoChoosesNothing(t *testing.T) {
	f, err := DriversOf(config.Default()).Choose(plan.ModeAuto, "", func(d kernel.Driver) (kernel.Facts, error) {
		return kernel.Facts{Missing: &kernel.Missing{What: d.Abilities(nil, time.Time{})[0].Title}}, nil
	})
	if err != nil || f.Missing == nil || !strings.Contains(f.Missing.Error(), "nftables") || !strings.Contains(f.Missing.Error(), "IPVS") {
		t.Errorf("missing %v, %v", f.Missing, err)
	}
}

func has(d kernel.Driver, plane plan.DataPlane) bool {
	return slices.Contains(d.Planes(), plane)
}
