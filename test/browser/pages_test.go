package browser

import (
	"bytes"
	_ "embed"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

// pages are those of the dashboard, and how to tell that each is there.
var pages = []struct{ name, hash, ready string }{
	{"overview", "#/", row("default/web:line", `.pill[data-plane="nftables"]`)},
	{"service", "#/service/default/web:line", `document.querySelector("#page-service:not([hidden]) .endpoints-table tbody tr")`},
	{"node", "#/node", `document.querySelector("#page-node:not([hidden]) table, #page-node:not([hidden]) dl")`},
}

var schemes = []string{"light", "dark"}

// prefers tells the page which colour scheme its reader's system has.
func (p *tab) prefers(scheme string) {
	p.Helper()
	_, err := chromedp.Call(p.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
		{Name: "prefers-color-scheme", Value: scheme},
		{Name: "prefers-reduced-motion", Value: "reduce"}, // contrast is measured of what stands still
	}})
	if err != nil {
		p.Fatal(err)
	}
}

// visit goes to another page without leaving the document.
func (p *tab) visit(hash, ready string) {
	p.Helper()
	eval[string](p, fmt.Sprintf(`location.hash = %q`, hash))
	p.eventually("the page "+hash+" is there", ready)
}

//go:embed third_party/axe-core/axe.min.js
var axe string

// violation holds what axe-core says of a rule that isn't kept.
type violation struct {
	ID, Impact, Help string
	Nodes            []struct {
		HTML           string `json:"html"`
		FailureSummary string `json:"failureSummary"`
	}
}

func TestAccessibility(t *testing.T) {
	w := shared.world(t)
	for _, width := range []int64{360, 1280} {
		p := open(t, w.url("localhost"), width, 900)
		for _, page := range pages {
			p.visit(page.hash, page.ready)
			for _, scheme := range schemes {
				p.prefers(scheme)
				p.axe(fmt.Sprintf("%s, %d px, %s", page.name, width, scheme))
			}
		}
		p.prefers("light")
		eval[bool](p, `document.querySelector("#help-open").click() ?? true`)
		p.eventually("the help is open", `document.querySelector("#help").open`)
		p.axe(fmt.Sprintf("help, %d px", width))
	}
}

// axe runs axe-core's checks of the page; those that are serious must hold.
func (p *tab) axe(where string) {
	p.Helper()
	if !eval[bool](p, `"axe" in window`) {
		eval[bool](p, axe+`;true`)
	}
	found := eval[[]violation](p, `axe.run(document, { resultTypes: ["violations"] }).then((r) => r.violations.map(({ id, impact, help, nodes }) =>
	  ({ id, impact, help, nodes: nodes.slice(0, 3).map(({ html, failureSummary }) => ({ html: html.slice(0, 300), failureSummary })) })))`)
	for _, v := range found {
		text := fmt.Sprintf("%s: %s (%s, %s)", where, v.Help, v.ID, v.Impact)
		for _, n := range v.Nodes {
			text += "\n  " + n.HTML + "\n    " + strings.ReplaceAll(n.FailureSummary, "\n", "\n    ")
		}
		if v.Impact == "serious" || v.Impact == "critical" {
			p.Error(text)
		} else {
			p.Log(text)
		}
	}
}

// fits checks that nobody has to scroll sideways (WCAG 2.2, 1.4.10 Reflow).
func (p *tab) fits(name string) {
	p.Helper()
	if by := eval[int](p, `document.documentElement.scrollWidth - document.documentElement.clientWidth`); by > 0 {
		wide := eval[[]string](p, `[...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest("svg")).slice(-3).map((e) => e.outerHTML.slice(0, 120))`)
		p.Errorf("%s is %d px wider than the window; so are %s", name, by, strings.Join(wide, "\n"))
	}
}

// TestUnknownService: an address with a service that there isn't says so, and shows
// nothing of one.
func TestUnknownService(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1280, 900)
	shown := `[...document.querySelectorAll("#page-service :is(.pill, .state, .service-addresses, .service-reason)")].filter((e) => e.checkVisibility()).length`
	p.visit("#/service/default/none:http", `document.querySelector("#page-service .empty:not([hidden])")?.textContent.includes("There is no service port default/none:http.")`)
	if n := eval[int](p, shown); n != 0 {
		t.Errorf("%d parts of a service's heading are shown", n)
	}
	p.visit(pages[1].hash, pages[1].ready)
	p.eventually("those of one that there is are", shown+` === 4`)
	p.visit("#/service/default/none:http", `document.querySelector("#page-service .empty:not([hidden])")`)
	if n := eval[int](p, shown); n != 0 {
		t.Errorf("%d parts of the former service's heading are still shown", n)
	}
}

// TestPicture makes the picture of the README. It writes it to the file that $KPROXY_PICTURE
// names, if there is one, once the charts have something to show.
func TestPicture(t *testing.T) {
	file, shown := os.Getenv("KPROXY_PICTURE"), 45*time.Second
	if file == "" {
		file, shown = filepath.Join(t.TempDir(), "dashboard.png"), 0
	}
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1360, 800)
	for i, name := range []string{"cart", "checkout", "search"} {
		m := w.manifest(name, 30+i)
		m.Ports = m.Ports[:1]
		if err := m.Write(w.manifests); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(m.Path(w.manifests)) })
		// What was sent before the service was there is lost, and sent again to nowhere.
		p.eventually("the service is there", row("default/"+name+":line", ""))
		t.Cleanup(w.ask(netip.MustParseAddrPort(fmt.Sprintf("10.96.0.%d:80", 30+i))))
	}
	p.eventually("everything is offloaded, and the charts have a minute",
		fmt.Sprintf(`%s && performance.now() > %d`, row("default/cart:line", `.pill[data-plane="nftables"]`), shown.Milliseconds()))
	p.picture(file)
}

// picture writes what is in sight to a file, with few bytes.
func (p *tab) picture(file string) {
	p.Helper()
	full, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		p.Fatal(err)
	}
	img, err := png.Decode(bytes.NewReader(full))
	if err != nil {
		p.Fatal(err)
	}
	var small bytes.Buffer
	must(p.T)(nil, png.Encode(&small, fewColours(img)))
	const most = 150 << 10 // bytes that a reader has to load
	if small.Len() > most {
		p.Errorf("the picture has %d bytes, more than %d", small.Len(), most)
	}
	must(p.T)(nil, os.WriteFile(file, small.Bytes(), 0o644))
}

// fewColours keeps the 256 colours that img has most of: a third of the bytes.
func fewColours(img image.Image) image.Image {
	count := map[color.RGBA]int{}
	for y := range img.Bounds().Dy() {
		for x := range img.Bounds().Dx() {
			count[color.RGBAModel.Convert(img.At(x, y)).(color.RGBA)]++
		}
	}
	colours := slices.SortedFunc(maps.Keys(count), func(a, b color.RGBA) int { return count[b] - count[a] })
	out := image.NewPaletted(img.Bounds(), nil)
	for _, c := range colours[:min(len(colours), 256)] {
		out.Palette = append(out.Palette, c)
	}
	draw.Draw(out, out.Bounds(), img, image.Point{}, draw.Src)
	return out
}

// TestScreens writes what people who change the dashboard should look at: whole
// pages, after a while, so that there is something in them.
func TestScreens(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1280, 900)
	// As on a phone, where they take no room; a picture of a whole page would be cut by it.
	must(t)(chromedp.Call(p.ctx, emulation.SetScrollbarsHidden, emulation.SetScrollbarsHiddenParams{Hidden: true}))
	p.eventually("the first samples are drawn", `performance.now() > 5000`)
	for _, size := range [][2]int64{{360, 800}, {800, 600}, {1440, 900}, {2560, 1440}} {
		p.run(chromedp.EmulateViewport(size[0], size[1]))
		for _, page := range pages {
			p.visit(page.hash, page.ready)
			for _, scheme := range schemes {
				p.prefers(scheme)
				p.shoot(fmt.Sprintf("%s-%d-%s", page.name, size[0], scheme), wholePage)
			}
			p.fits(fmt.Sprintf("%s at %d px", page.name, size[0]))
		}
	}
}

// TestOverviewIsInOrder looks at the list at widths where it is laid out differently.
func TestOverviewIsInOrder(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1280, 900)
	for _, width := range []int64{360, 820, 1150, 1250, 1280, 1600, 1920} {
		p.run(chromedp.EmulateViewport(width, 900))
		p := p.in(t)
		p.eventually("there is a list", pages[0].ready)
		eval[bool](p, `new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(true)))))`) // what listens for sizes has moved
		for what, wrong := range map[string]string{
			"headings touch each other":                       `[...document.querySelectorAll(".heading")].filter((e) => e.offsetWidth > 1).some((e, i, all) => { const r = document.createRange(); r.selectNodeContents(e); return i + 1 < all.length && r.getBoundingClientRect().right > all[i + 1].getBoundingClientRect().left - 8 })`,
			"numbers aren't under their headings":             `innerWidth > 800 && ["active", "rate"].some((c) => { const h = document.querySelector(".h-" + c), f = document.querySelector(".c-" + c + " .figure"); return h.offsetWidth > 0 && Math.abs(h.getBoundingClientRect().left - f.getBoundingClientRect().left) > 1 })`,
			"a row's figures don't fit":                       `[...document.querySelectorAll(".row")].some((r) => { const b = r.getBoundingClientRect(); return [...r.querySelectorAll(".cell > *, .endpoints > *")].some((e) => { const c = e.getBoundingClientRect(); return c.height > 0 && getComputedStyle(e).display !== "none" && (c.bottom > b.bottom + 1 || c.top < b.top - 1) }) })`,
			"a row is wider than the list":                    `[...document.querySelectorAll(".row")].some((r) => r.scrollWidth > r.clientWidth + 1)`,
			"something is cut off":                            `[...document.querySelectorAll(innerWidth > 800 && innerWidth < 1200 ? ".reason, .addresses" : ".addresses")].some((e) => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1)`,
			"Tab comes by in another order than what is seen": `(() => { const s = document.querySelector(".services"), a = document.querySelector(".beside aside"), s1 = s.getBoundingClientRect(), a1 = a.getBoundingClientRect(); const before = a1.bottom <= s1.top || a1.right <= s1.left; return before !== Boolean(s.compareDocumentPosition(a) & Node.DOCUMENT_POSITION_PRECEDING) })()`,
		} {
			if eval[bool](p, wrong) {
				p.Errorf("at %d px %s", width, what)
			}
		}
		p.fits(fmt.Sprintf("overview at %d px", width))
		p.shoot(fmt.Sprintf("overview-order-%d", width), chromedp.CaptureScreenshot())
	}
}

func TestForeignHostIsRefused(t *testing.T) {
	w := shared.world(t)
	p := blank(t)
	p.forgive("status of 403") // of nothing else, such as headers that it doesn't heed at this address
	for path, want := range map[string]int64{"": http.StatusForbidden, "api/v1/status": http.StatusForbidden, "ui/main.js": http.StatusForbidden} {
		resp, err := chromedp.RunResponse(p.ctx, chromedp.Navigate(w.url(foreign)+path))
		if err != nil {
			t.Fatal(err)
		}
		if int64(resp.Status) != want {
			t.Errorf("/%s under a foreign name: got %d, want %d", path, resp.Status, want)
		}
		if text := eval[string](p, `document.body.textContent`); !strings.Contains(text, "DNS rebinding") {
			t.Errorf("the refusal of /%s doesn't say why: %s", path, text)
		}
	}

	p.quiet()

	// What the policy forbids, the browser doesn't do.
	p.run(chromedp.Navigate(w.url("localhost")))
	p.eventually("the page is there", `document.querySelector("#starting").hidden`)
	p.quiet()
	eval[bool](p, `(() => { const s = document.createElement("script"); s.textContent = "window.inline = true"; document.body.append(s); return true })()`)
	if eval[bool](p, `window.inline === true`) {
		t.Error("an inline script ran")
	}
	if c := strings.Join(p.take(), "\n"); !strings.Contains(c, "Content Security Policy") {
		t.Errorf("the browser doesn't say why an inline script didn't run: %s", c)
	}
}
