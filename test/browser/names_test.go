package browser

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

// TestLongNames: names as long as Kubernetes allows are read as a whole at every size, and tables of a phone are cards
// without scrolling sideways. Who is refused by rules of the kernel's is listed.
func TestLongNames(t *testing.T) {
	w := shared.world(t)
	long := func(word string) string { return strings.Repeat(word+"-", 63/len(word)+1)[:62] + "x" }
	m := w.manifest(long("payments"), 43)
	m.Namespace, m.Ports = long("production"), m.Ports[:1]
	m.Ports[0].Name = "http-and-grpc-x"
	must(t)(nil, m.Write(w.manifests))
	t.Cleanup(func() { _ = os.Remove(m.Path(w.manifests)) })
	empty := w.manifest(long("nothing"), 44)
	empty.Ports, empty.Endpoints = empty.Ports[:1], nil
	must(t)(nil, empty.Write(w.manifests))
	t.Cleanup(func() { _ = os.Remove(empty.Path(w.manifests)) })
	t.Cleanup(w.ask(netip.MustParseAddrPort("10.96.0.43:80")))
	t.Cleanup(w.ask(netip.MustParseAddrPort("10.96.0.44:80")))
	key := m.Namespace + "/" + m.Name + ":" + m.Ports[0].Name

	p := open(t, w.url("localhost"), 1440, 900)
	must(t)(chromedp.Call(p.ctx, emulation.SetScrollbarsHidden, emulation.SetScrollbarsHiddenParams{Hidden: true})) // as on a phone
	p.eventually("who is refused for want of an endpoint is listed", `/10\.1\.0\.2:\d+default\/nothing.*No usable endpoint/.test(document.querySelector(".refused-panel tbody")?.textContent)`)
	const cut = `[...document.querySelectorAll(".name, .page:not([hidden]) h1:not(.sr), h2, .timeline .what, .cards td, .cards th")].filter((e) => e.offsetWidth > 0 && (e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1)).map((e) => e.outerHTML.slice(0, 200))`
	const choices = `(() => { const pen = document.createElement("canvas").getContext("2d"); return [...document.querySelectorAll(".filters select")].filter((e) => {
	  const s = getComputedStyle(e); pen.font = s.font;
	  return e.offsetWidth > 0 && pen.measureText(e.selectedOptions[0].textContent).width + parseFloat(s.paddingLeft) + parseFloat(s.paddingRight) + 20 > e.clientWidth }).map((e) => e.id) })()` // 20 for the arrow
	const sideways = `[...document.querySelectorAll(".refused-panel .scroll, .p-refused .scroll, .p-endpoints .scroll, .p-connections .scroll")].filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.getAttribute("aria-label"))`
	for _, width := range []int64{360, 800, 1440, 2560} {
		p.run(chromedp.EmulateViewport(width, 900))
		for name, page := range map[string][2]string{
			"overview": {"#/?q=-paymentsx", fmt.Sprintf(`document.querySelector('.row[data-key="%s"]')`, key)},
			"service":  {"#/service/" + key, `document.querySelector(".p-connections tbody tr") && document.querySelector(".endpoints-table tbody tr")`},
			"empty":    {"#/service/default/" + empty.Name + ":line", `document.querySelector(".p-refused tbody tr")`},
		} {
			where := fmt.Sprintf("the %s at %d px", name, width)
			p.visit(page[0], page[1])
			if name == "overview" {
				eval[bool](p, `(document.querySelector(".refused-panel").open = true)`)
				if got := eval[[]string](p, choices); len(got) > 0 {
					t.Errorf("%s cuts off the choice of %s", where, got)
				}
			}
			p.fits(where)
			if got := eval[[]string](p, cut); len(got) > 0 {
				t.Errorf("%s cuts off %s", where, strings.Join(got, "\n"))
			}
			if got := eval[[]string](p, sideways); width == 360 && len(got) > 0 {
				t.Errorf("%s has tables that are wider: %s", where, got)
			}
			if width == 360 {
				p.axe(where)
			}
			p.shoot(fmt.Sprintf("names-%s-%d", name, width), wholePage)
		}
	}
}
