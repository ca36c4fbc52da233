package program

import (
	"os"
	"os/exec"
)

// HasIPVS reports whether this host's kernel has IPVS. It doesn't ask kproxy, whose
// answer is tested too.
func HasIPVS() bool {
	_ = exec.Command("modprobe", "ip_vs").Run() // fails where it is built in as well
	_, err := os.Stat("/proc/net/ip_vs")
	return err == nil
}
