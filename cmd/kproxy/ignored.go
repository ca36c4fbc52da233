package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
)

// ignoredFlag is one of kube-proxy's that is taken, so that its command line
// can stay as it is, and has no effect.
type ignoredFlag struct {
	flag cli.Flag
	why  string // as the table of fields says of the same in a KubeProxyConfiguration
}

// ignoredFlags take values of the type they have in kube-proxy, so that a slip
// is found here too.
func ignoredFlags() []ignoredFlag {
	duration, word, words, onOff := new(time.Duration), new(string), new([]string), new(bool)
	var all []ignoredFlag
	for _, f := range []struct {
		name  string
		kind  any
		field string
	}{
		{"bind-address-hard-fail", onOff, "bindAddressHardFail"},
		{"config-sync-period", duration, "configSyncPeriod"},
		{"feature-gates", word, "featureGates"},
		{"iptables-sync-period", duration, "iptables.syncPeriod"},
		{"iptables-min-sync-period", duration, "iptables.minSyncPeriod"},
		{"ipvs-sync-period", duration, "ipvs.syncPeriod"},
		{"ipvs-min-sync-period", duration, "ipvs.minSyncPeriod"},
		{"ipvs-exclude-cidrs", words, "ipvs.excludeCIDRs"},
		{"log-flush-frequency", duration, "logging.flushFrequency"},
		{"log-text-split-stream", onOff, "logging.options.text.splitStream"},
		{"log-text-info-buffer-size", word, "logging.options.text.infoBufferSize"},
		{"log-json-split-stream", onOff, "logging.options.json.splitStream"},
		{"log-json-info-buffer-size", word, "logging.options.json.infoBufferSize"},
		{"proxy-port-range", word, "portRange"},
		{"show-hidden-metrics-for-version", word, "showHiddenMetricsForVersion"},
		{"vmodule", word, "logging.vmodule"},
	} {
		fields := config.Fields()
		i := slices.IndexFunc(fields, func(x config.Field) bool { return x.Path == f.field })
		why := fields[i].Ignored
		all = append(all, ignoredFlag{flagOf(f.name, f.kind, "kube-proxy's; ignored: "+why), why})
	}
	return all
}

func (f ignoredFlag) name() string { return f.flag.Names()[0] }

// line says what became of the flag on c's command line.
func (f ignoredFlag) line(c *cli.Context) string {
	return fmt.Sprintf("--%s=%v: ignored: %s", f.name(), c.Value(f.name()), f.why)
}

// ignored returns those on the command line.
func ignored(c *cli.Context) []ignoredFlag {
	return slices.DeleteFunc(ignoredFlags(), func(f ignoredFlag) bool { return !c.IsSet(f.name()) })
}
