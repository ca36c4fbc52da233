package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent/offline"
	"kproxy.dev/kproxy/bugreport"
	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

const (
	// reportTime bounds the questions of a report, unless --timeout says otherwise. What then isn't answered, or masked and compressed, is
	// left out; to finish the file at hand takes less than the rest of half a minute.
	reportTime = 20 * time.Second
	// servicesReported is how many service ports a report has, those in trouble first, and servicesDescribed how many of them are described:
	// of 10,000 with ten endpoints each, all would cost seconds of processor time, and fill the archive.
	servicesReported, servicesDescribed = 500, 200
)

func maskFlag() cli.Flag {
	return &cli.BoolFlag{Name: "mask", Usage: "replace addresses, and names that kproxy knows, the same ones by the same ones; interfaces, and the chains, sets and comments of other programs, stay"}
}

func bugreportCommand() *cli.Command {
	return &cli.Command{
		Name:  "bugreport",
		Usage: "put what helps to find out what is wrong on this node into one archive, also when kproxy is dead",
		Description: "It changes nothing, gives way to all other processes, takes half a minute and 20 MB at most. Secrets\n" +
			"are left out; --mask hides who you are as well. Its index.html leads through it. Run it as root.",
		Flags: []cli.Flag{socketFlag(), maskFlag(),
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "`FILE` to write; - for standard output", DefaultText: "kproxy-bugreport-NODE-TIME.tar.gz"},
			&cli.DurationFlag{Name: "timeout", Value: reportTime, Usage: "leave out what isn't had by then"},
			&cli.StringFlag{Name: "mask-key", Hidden: true}, // of the plugin: so the reports of all nodes are masked alike
		},
		Action: writeReport,
	}
}

func writeReport(c *cli.Context) error {
	if c.Duration("timeout") <= 0 {
		return usageError("--timeout: %s is not more than 0", c.Duration("timeout"))
	}
	var mask *bugreport.Mask
	switch {
	case c.IsSet("mask-key"):
		mask = bugreport.NewMask([]byte(c.String("mask-key")))
	case c.Bool("mask"):
		mask = bugreport.NewMask([]byte(rand.Text()))
	}
	ctx, cancel := context.WithTimeout(c.Context, c.Duration("timeout"))
	defer cancel()
	if c.String("output") == "-" {
		to := c.App.Writer
		if f := fileOf(to); f != nil {
			to = f // as it is: a terminal isn't where it goes
		}
		return reportTo(ctx, c, to, mask, new(string))
	}
	var archive bytes.Buffer // at most bugreport.SizeAtMost
	var folder string
	if err := reportTo(ctx, c, &archive, mask, &folder); err != nil {
		return err
	}
	name := cmp.Or(c.String("output"), folder+".tar.gz")
	if err := os.WriteFile(name, archive.Bytes(), 0o600); err != nil {
		return flagError("output", err)
	}
	fmt.Fprintf(c.App.Writer, "%s: %sB; unpack it and open index.html\n", name, screen.Bytes(float64(archive.Len())))
	return nil
}

// reportTo writes a report and tells the name of its folder.
func reportTo(ctx context.Context, c *cli.Context, to io.Writer, mask *bugreport.Mask, folder *string) error {
	a := listen(ctx, clientOf(c))
	mask.Learn(a.names()...)
	mask.LearnFrom(a.raw["/log"])
	mask.LearnFrom(a.raw["/status"])
	end, _ := ctx.Deadline()
	r := bugreport.New(to, bugreport.Config{Node: a.node(), At: time.Now(), End: end, Mask: mask})
	*folder = r.Folder()
	a.standOut(r)
	a.add(r)
	r.AddNode(ctx)
	if a.status == nil && ctx.Err() == nil { // which has what this finds out
		var b bytes.Buffer
		report, err := offline.CheckHost(ctx)
		if err == nil {
			err = printHost(&b, report)
		}
		r.Add("check-host.txt", "kproxy check --host", b.Bytes(), err)
	}
	return r.Close()
}

// said holds what a kproxy says; errors where it is dead, hangs or is older.
type said struct {
	raw    map[string][]byte
	errs   map[string]error
	status *plan.Status
	events []plan.Event
	config map[string]json.RawMessage
}

// listen asks kproxy, and doesn't go on after it hangs.
func listen(ctx context.Context, client *web.Client) *said {
	a := &said{raw: map[string][]byte{}, errs: map[string]error{}}
	var dead error
	for _, path := range []string{"/status", "/log", "/configz", "/metrics", "/timeline"} {
		ctx, cancel := bugreport.Step(ctx)
		switch {
		case dead != nil:
			a.errs[path] = dead
		case path == "/status":
			a.raw[path], a.errs[path] = client.Text(ctx, fmt.Sprintf("/status?services=%d", servicesReported))
		case path == "/timeline":
			a.events, a.errs[path] = pastEvents(ctx, client, []string{""}, eventsAtMost)
		default:
			a.raw[path], a.errs[path] = client.Text(ctx, path)
		}
		cancel()
		if err := a.errs[path]; errors.Is(err, web.ErrNotRunning) || errors.Is(err, web.ErrNoAnswer) || errors.Is(err, os.ErrPermission) {
			dead = err
		}
	}
	if a.errs["/status"] == nil {
		var st plan.Status
		if a.errs["/status"] = json.Unmarshal(a.raw["/status"], &st); a.errs["/status"] == nil {
			st.Shorten(servicesReported) // an older kproxy hasn't
			a.status = &st
		}
	}
	if a.errs["/configz"] == nil {
		a.errs["/configz"] = json.Unmarshal(a.raw["/configz"], &a.config)
	}
	return a
}

func (a *said) node() string {
	if a.status != nil && a.status.Node != "" {
		return a.status.Node
	}
	return hostName()
}

// names returns what a mask replaces: of this node, its services, and files and hosts that the configuration names.
func (a *said) names() []string {
	name, _ := os.Hostname()
	out := []string{name, a.node()}
	if short, _, ok := strings.Cut(name, "."); ok {
		out = append(out, short)
	}
	if a.status != nil {
		for i := range a.status.Services {
			s := &a.status.Services[i]
			out = append(out, s.Namespace, s.Name, s.Port)
			for k := range s.Endpoints {
				out = append(out, s.Endpoints[k].Node)
			}
		}
		for _, title := range a.status.Others {
			out = append(out, titleParts(title)...)
		}
		for _, s := range a.status.Sources {
			out = append(out, pathNames(s.Name)...)
		}
		for _, n := range a.status.PassiveHealth.Nodes {
			out = append(out, n.Name)
		}
	}
	for i := range a.events {
		out = append(out, titleParts(a.events[i].Service)...)
	}
	var cfg struct {
		Manifests                                    []string
		Kubeconfig, Master, HostnameOverride, Config string
	}
	if json.Unmarshal(a.config["kproxy.dev"], &cfg) == nil {
		for _, path := range append(cfg.Manifests, cfg.Kubeconfig, cfg.Config) {
			out = append(out, pathNames(path)...)
		}
		if u, err := url.Parse(cfg.Master); err == nil {
			out = append(out, u.Hostname())
		}
		out = append(out, cfg.HostnameOverride)
	}
	return out
}

// titleParts splits a service port's title, NAMESPACE/NAME:PORT.
func titleParts(title string) []string {
	return strings.FieldsFunc(title, func(r rune) bool { return r == '/' || r == ':' })
}

// usualFolders are parts of paths that every host has.
const usualFolders = " etc var lib run tmp usr home root opt mnt srv local kubernetes manifests manifest kube-proxy kproxy pki config conf "

// pathNames are the parts of a path that may tell something, without extensions.
func pathNames(path string) (out []string) {
	for part := range strings.SplitSeq(filepath.Clean(path), "/") {
		part = strings.TrimSuffix(part, filepath.Ext(part))
		if part != "" && part != "." && !strings.Contains(usualFolders, " "+part+" ") {
			out = append(out, part)
		}
	}
	return out
}

// standOut puts at the head of a report what a maintainer asks first.
func (a *said) standOut(r *bugreport.Report) {
	if a.status == nil {
		r.StandsOut("kproxy says nothing: %v", a.errs["/status"])
	} else {
		st := a.status
		r.StandsOut("kproxy %s, mode %s, %s; up %s. %s", st.Version, st.Mode, healthTitle(st), time.Duration(st.UptimeSeconds)*time.Second, st.Verdict())
		if st.Version != version {
			r.StandsOut("This report was made by kproxy %s, and asked one of version %s.", version, st.Version)
		}
		for _, remark := range screen.Remarks(st) {
			r.StandsOut("%s%s", remark.Label, remark.Text)
		}
		trouble := 0
		for i := range st.Services {
			if s := &st.Services[i]; s.InTrouble() {
				if trouble++; trouble <= 20 {
					r.StandsOut("%s: %s, %s, %s endpoints, %d failed connections: %s", s.Title(), s.DataPlane, s.State, endpointsTitle(s), s.Connections.Failed, strings.Join(append([]string{s.Reason}, s.Problems...), "; "))
				}
			}
		}
		if trouble > 20 {
			r.StandsOut("%d more service ports are in trouble: describe.txt", trouble-20)
		}
		for _, c := range st.Capabilities {
			if !c.Supported {
				r.StandsOut("without %s: %s", c.Name, c.Reason)
			}
		}
	}
	if count, limit, err := conntrack.Use(); err == nil && limit > 0 && count > limit-limit/8 {
		r.StandsOut("connection tracking is nearly full: %d of %d entries", count, limit)
	}
	for _, s := range kernel.WrongSysctls(kernel.Sysctls()) {
		r.StandsOut("%s", s)
	}
}

// add adds what kproxy says.
func (a *said) add(r *bugreport.Report) {
	text := func(print func(io.Writer) error) []byte {
		var b bytes.Buffer
		if err := print(&b); err != nil {
			fmt.Fprintln(&b, err)
		}
		return b.Bytes()
	}
	r.Add("versions.txt", "what made this report", fmt.Appendf(nil, "kproxy %s, commit %s, %s, %s/%s\n", version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH), nil)
	r.Add("log.txt", "the last lines that kproxy logged", a.raw["/log"], a.errs["/log"])
	r.Add("config.json", "the configuration in effect, defaults included", a.raw["/configz"], a.errs["/configz"])
	if st := a.status; st != nil {
		r.Add("status.txt", "kproxy status -o wide, of services as in status.json", text(func(w io.Writer) error { return printStatus(w, *st, true) }), nil)
		r.Add("describe.txt", fmt.Sprintf("kproxy describe of %d service ports, those in trouble first", servicesDescribed), text(a.describe), nil)
		r.Add("capabilities.txt", "what kproxy found on this host", text(func(w io.Writer) error {
			for _, c := range st.Capabilities {
				fmt.Fprintf(w, "%-24s %-5v %s\n", c.Name, c.Supported, c.Reason)
			}
			return nil
		}), nil)
	}
	r.Add("events.txt", "kproxy events", text(func(w io.Writer) error {
		if len(a.events) == 0 {
			return nil
		}
		return (&eventPrinter{w: w}).print(a.events)
	}), a.errs["/timeline"])
	r.Add("metrics.txt", "the metrics that Prometheus gets", a.raw["/metrics"], a.errs["/metrics"])
	r.Add("status.json", fmt.Sprintf("kproxy status -o json, of %d service ports at most, those in trouble first", servicesReported), a.raw["/status"], a.errs["/status"])
}

// describe describes service ports.
func (a *said) describe(w io.Writer) error {
	events := map[string][]plan.Event{}
	for _, e := range a.events {
		events[e.Service] = append(events[e.Service], e)
	}
	for i := range a.status.Services[:min(len(a.status.Services), servicesDescribed)] {
		s := &a.status.Services[i]
		of := events[s.Title()]
		if err := printDescription(w, s, "not asked", of[max(0, len(of)-eventsDescribed):]); err != nil {
			return err
		}
	}
	return nil
}
