package main

import (
	"fmt"
	"slices"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
)

// ignoredFlag is one of kube-proxy's that is taken, so that its command line
// can stay as it is, and has no effect.
type ignoredFlag struct {
	flag cli.Flag
	// field is what means the same in a KubeProxyConfiguration; the reason stands
	// in the table of fields.
	field string
}

// ignoredFlags take values of the type they have in kube-proxy, so that a slip
// is found here too.
func ignoredFlags() []ignoredFlag {
	duration := func(name string) cli.Flag { return &cli.DurationFlag{Name: name} }
	word := func(name string) cli.Flag { return &cli.StringFlag{Name: name} }
	onOff := func(name string) cli.Flag { return &cli.BoolFlag{Name: name} }
	all := []ignoredFlag{
		{onOff("bind-address-hard-fail"), "bindAddressHardFail"},
		{duration("config-sync-period"), "configSyncPeriod"},
		{word("feature-gates"), "featureGates"},
		{duration("iptables-sync-period"), "iptables.syncPeriod"},
		{duration("iptables-min-sync-period"), "iptables.minSyncPeriod"},
		{duration("ipvs-sync-period"), "ipvs.syncPeriod"},
		{duration("ipvs-min-sync-period"), "ipvs.minSyncPeriod"},
		{&cli.StringSliceFlag{Name: "ipvs-exclude-cidrs"}, "ipvs.excludeCIDRs"},
		{duration("log-flush-frequency"), "logging.flushFrequency"},
		{onOff("log-text-split-stream"), "logging.options.text.splitStream"},
		{word("log-text-info-buffer-size"), "logging.options.text.infoBufferSize"},
		{onOff("log-json-split-stream"), "logging.options.json.splitStream"},
		{word("log-json-info-buffer-size"), "logging.options.json.infoBufferSize"},
		{word("proxy-port-range"), "portRange"},
		{word("show-hidden-metrics-for-version"), "showHiddenMetricsForVersion"},
		{word("vmodule"), "logging.vmodule"},
	}
	for _, f := range all {
		describe(f.flag, "kube-proxy's; ignored: "+f.why())
	}
	return all
}

func describe(f cli.Flag, usage string) {
	switch f := f.(type) {
	case *cli.BoolFlag:
		f.Usage = usage
	case *cli.DurationFlag:
		f.Usage = usage
	case *cli.StringFlag:
		f.Usage = usage
	case *cli.StringSliceFlag:
		f.Usage = usage
	}
}

func (f ignoredFlag) name() string { return f.flag.Names()[0] }

// why returns the reason.
func (f ignoredFlag) why() string {
	fields := config.Fields()
	if i := slices.IndexFunc(fields, func(x config.Field) bool { return x.Path == f.field }); i >= 0 {
		return fields[i].Ignored
	}
	return ""
}

// line says what became of the flag on c's command line.
func (f ignoredFlag) line(c *cli.Context) string {
	return fmt.Sprintf("--%s=%v: ignored: %s", f.name(), c.Value(f.name()), f.why())
}

// ignored returns those on the command line.
func ignored(c *cli.Context) []ignoredFlag {
	return slices.DeleteFunc(ignoredFlags(), func(f ignoredFlag) bool { return !c.IsSet(f.name()) })
}
