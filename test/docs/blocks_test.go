package docs

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// block is a command on a page with what it printed.
type block struct {
	command string
	output  string // with the command in its first line
}

var blocks = regexp.MustCompile("(?s)<!-- run: ([^\n]*?) -->\n```text\n(.*?)```\n")

// blocksOf returns the blocks of a page, in order.
func blocksOf(page string) []block {
	var out []block
	for _, m := range blocks.FindAllStringSubmatch(page, -1) {
		out = append(out, block{m[1], m[2]})
	}
	return out
}

// replaced is page with the output of each block as now has it, by command.
func replaced(page string, now map[string]string) string {
	return blocks.ReplaceAllStringFunc(page, func(s string) string {
		command := blocks.FindStringSubmatch(s)[1]
		return fmt.Sprintf("<!-- run: %s -->\n```text\n%s```\n", command, now[command])
	})
}

// prose is a page without its blocks.
func prose(page string) string { return blocks.ReplaceAllString(page, "") }

// What varies from run to run, wherever it is printed.
var (
	clientPort = regexp.MustCompile(`\b(10\.1\.0\.2(?:,tcp)?):\d+`)
	flowPorts  = regexp.MustCompile(`\b(sport|dport)=(?:[1-9]\d{4}|[2-9]\d{3})\b`)
	flowCounts = regexp.MustCompile(`\b(packets|bytes|use)=\d+`)
	timeLeft   = regexp.MustCompile(`\btimeout \d+`)
	age        = regexp.MustCompile(`\b(?:\d+(?:d|h|ms|m|s))+\b`)
	amount     = regexp.MustCompile(`\b\d+(?:\.\d)?[KMG]?B\b|\b\d+\.\d[KMG]\b`)
	tableSize  = regexp.MustCompile(`\(size=\d+\)`) // of IPVS, which newer kernels adapt
	number     = regexp.MustCompile(`(^|[\s+])\d+(\s|$)`)
	space      = regexp.MustCompile(`[ \t]+`)
	turn       = regexp.MustCompile(`:\s+it\s+is\s+next,\s+unless\s+another\s+connection\s+comes\s+first`) // round robin begins anywhere
	release    = regexp.MustCompile(`^kproxy \S+ on`)
)

// masked is a block's output with what varies taken out, for comparison.
func masked(b block) string {
	name, _, _ := strings.Cut(b.command, " ")
	if !slices.Contains([]string{"kproxy", "ipset", "ipvsadm", "conntrack", "cat"}, name) {
		return b.output
	}
	output := tableSize.ReplaceAllString(turn.ReplaceAllString(b.output, ""), "(size=#)")
	lines := strings.Split(strings.TrimSuffix(output, "\n"), "\n")
	for i, l := range lines[1:] {
		l = clientPort.ReplaceAllString(timeLeft.ReplaceAllString(l, "timeout #"), "$1:#")
		if name != "ipset" {
			l = flowCounts.ReplaceAllString(flowPorts.ReplaceAllString(l, "$1=#"), "$1=#")
			l = amount.ReplaceAllString(age.ReplaceAllString(l, "#"), "#")
			l = release.ReplaceAllString(l, "kproxy # on")
			for range 2 { // neighbours share the space between them
				l = number.ReplaceAllString(l, "$1#$2")
			}
			l = strings.TrimSpace(space.ReplaceAllString(l, " "))
		}
		lines[i+1] = l
	}
	if name != "kproxy" || strings.HasPrefix(b.command, "kproxy connections") {
		slices.Sort(lines[1:]) // hash tables have no order
	}
	return strings.Join(lines, "\n") + "\n"
}
