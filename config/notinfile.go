package config

import (
	"cmp"
	"fmt"
	"strings"
	"time"
)

// Lost is a part of a Config that a KubeProxyConfiguration doesn't hold.
type Lost struct {
	Flag  string // that says it, beside the file
	Value string // in the Config
	Read  string // what the file makes of it
}

// String names the flag, what is lost, and what to do.
func (l Lost) String() string {
	if l.Flag == "oom-score-adj" { // without a value, which no flag says either
		return fmt.Sprintf("--oom-score-adj: no file can leave it as it is; this one makes it %s, unless the flag says otherwise", l.Read)
	}
	return fmt.Sprintf("--%s=%s: no such file can say so; with this one it is %q: give the flag beside it", l.Flag, l.Value, l.Read)
}

// NotInFile returns what is lost when c is written by KubeProxyYAML: it reads
// the file as `kproxy run --config` does, and compares.
func (c Config) NotInFile() ([]Lost, error) {
	text, err := c.KubeProxyYAML()
	if err != nil {
		return nil, err
	}
	f, err := Parse(c.File, text)
	if err != nil {
		return nil, fmt.Errorf("read what was written: %w", err)
	}
	back := AsKubeProxy()
	f.Apply(&back)
	back.InCluster = c.InCluster // that is where it runs, not what it says
	var out []Lost
	for _, change := range c.inForce().Changes(back.inForce()) {
		out = append(out, Lost{FlagOf(change.Part), change.From, change.To})
	}
	return out, nil
}

// inForce spells out what has several spellings for the same.
func (c Config) inForce() Config {
	c.Verbosity = strings.ToLower(c.LogLevel().String())
	c.DetectLocalMode = cmp.Or(c.DetectLocalMode, DetectLocalModes[0])
	c.Client.QPS, c.Client.Burst = cmp.Or(c.Client.QPS, 5), cmp.Or(c.Client.Burst, 10) // as client-go does
	established := c.Conntrack.TCPEstablished
	switch d, err := time.ParseDuration(c.IPVS.TCPTimeout); {
	case err == nil:
		c.IPVS.TCPTimeout = d.String()
	case established != 0:
		c.IPVS.TCPTimeout = c.IPVS.TCPTimeoutOf(established).String()
	}
	return c
}
