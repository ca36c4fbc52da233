package agent

import (
	"runtime"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// onlineCPUs lists the machine's CPUs.
const onlineCPUs = "/sys/devices/system/cpu/online"

// ensureConntrack sets what is configured of the kernel's connection tracking,
// says what wasn't so, and returns what can't be set.
func (a *Agent) ensureConntrack() (lacking []kernel.SysctlReport, err error) {
	c := a.cfg.Conntrack
	cpus, err := kernel.OnlineCPUs(onlineCPUs)
	if err != nil {
		cpus = runtime.NumCPU()
		a.log.Warn("taking this process's CPUs for the machine's", "cpus", cpus, "error", err)
	}
	reports, err := kernel.EnsureConntrack(kernel.Conntrack{
		MaxPerCore: c.MaxPerCore, Min: c.Min, TCPEstablished: c.TCPEstablished, TCPCloseWait: c.TCPCloseWait,
		UDP: c.UDP, UDPStream: c.UDPStream, TCPBeLiberal: c.TCPBeLiberal,
	}, cpus)
	for _, r := range reports {
		if r.Err != nil {
			lacking = append(lacking, r)
		}
		a.log.Warn("conntrack", "report", r.String())
	}
	return lacking, err
}

// setUpConntrack is ensureConntrack, and shows in the status what can't be set:
// services work without.
func (a *Agent) setUpConntrack() error {
	lacking, err := a.ensureConntrack()
	for _, r := range lacking {
		a.caps.All = append(a.caps.All, plan.Capability{Name: "conntrack " + r.Name, Reason: r.String()})
	}
	return err
}
