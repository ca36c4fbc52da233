package browser

import (
	"net/netip"
	"os"
	"testing"

	"github.com/chromedp/chromedp"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/web"
)

// TestClients: short connections leave their clients behind: the drawing follows one, and a table says who
// talked to whom; who was refused is listed with the reason, here and on the overview.
func TestClients(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1440, 900)
	p.visit(pages[1].hash, pages[1].ready)
	const client = "10.1.0.2"

	p.eventually("the drawing follows the client that was there", `document.querySelector(".drawing svg")?.textContent.includes("`+client+`") && document.querySelector("#trace-who").selectedOptions[0].textContent.includes("`+client+`")`)
	p.eventually("and says which endpoints took it", `[...document.querySelectorAll(".drawing .endpoint .detail")].filter((e) => / of this client$/.test(e.textContent)).length === 3`)
	p.eventually("the command that prints the same is there", `document.querySelector(".trace-command code").textContent === "kproxy trace --from `+client+` 10.96.0.10:80"`)
	p.eventually("connections that ended are listed", `/Ended .*`+client+`/.test(document.querySelector(".p-connections tbody").textContent)`)
	p.eventually("who talks to whom has a column for each endpoint", `document.querySelectorAll(".talks thead th").length === 6 && document.querySelector(".talks tbody tr").textContent.startsWith("`+client+`")`)
	p.eventually("endpoints say when they were last checked, and how long that took", `[...document.querySelectorAll(".endpoints-table tbody tr")].every((e) => /[\d.]+ m?s(just now|\d+ s ago)/.test(e.textContent))`)
	p.shoot("clients-1440", wholePage)

	// Clients that are offered can connect to the address that is chosen.
	stop6 := w.ask(netip.MustParseAddrPort("[fd00:96::a]:80"))
	to := func(address string) {
		eval[bool](p, `((a) => { a.value = "`+address+`"; a.dispatchEvent(new Event("change")); return a.value === "`+address+`"; })(document.querySelector("#trace-address"))`)
	}
	offered := `[...document.querySelector("#trace-who").options].map((o) => o.value).filter((v) => /[.:]/.test(v))`
	p.eventually("the service has an address of IPv6", `[...document.querySelector("#trace-address").options].some((o) => o.value === "[fd00:96::a]:80")`)
	to("[fd00:96::a]:80")
	p.eventually("clients of IPv6 are offered, and none of IPv4", offered+`.length > 0 && `+offered+`.every((v) => v.includes(":"))`)
	to("10.96.0.10:80")
	p.eventually("clients of IPv4 are offered again, and none of IPv6", offered+`.length > 0 && `+offered+`.every((v) => !v.includes(":"))`)
	stop6()

	// In userspace connects are timed, and a service that nothing answers refuses.
	pin := func(name, port string) {
		_, err := w.client.Pin(t.Context(), web.PinRequest{Namespace: "default", Name: name, Port: port, Preference: "userspace"})
		must(t)(nil, err)
	}
	m := w.manifest("refuser", 41)
	m.Ports = []lab.ManifestPort{{Name: "http", Port: 80, Target: 9}} // where nothing listens
	must(t)(nil, m.Write(w.manifests))
	t.Cleanup(func() { _ = os.Remove(m.Path(w.manifests)) })
	p.visit("#/service/default/refuser:http", `document.querySelector('.endpoints-table tbody [data-health="down"], .endpoints-table tbody tr[data-health="down"]')`)
	pin("refuser", "http")
	p.eventually("it is served in userspace", `document.querySelector('.service-title [data-plane="userspace"]')`)
	stop := w.ask(netip.MustParseAddrPort("10.96.0.41:80"))
	p.eventually("those refused are listed with client and reason", `/`+client+`:\d+10\.96\.0\.41:8010\.2\.0\.\d:9.*connection refused/.test(document.querySelector(".p-refused tbody").textContent)`)
	p.eventually("and counted", `Number(document.querySelector(".talks tbody .error").textContent) > 0`)
	p.axe("a page with refused connections")
	p.shoot("refused-service-1440", wholePage)
	p.visit("#/", pages[0].ready)
	p.eventually("the overview lists them as well, with a link to the cause", `document.querySelector(".refused-panel:not([hidden]) a[href='#/service/default/refuser:http']")`)
	eval[bool](p, `(document.querySelector(".refused-panel").open = true)`)
	p.axe("the overview with refused connections")
	p.shoot("refused-overview-1440", wholePage)
	p.run(chromedp.EmulateViewport(360, 740))
	p.fits("the overview with refused connections at 360 px")
	p.shoot("refused-overview-360", wholePage)
	p.visit("#/service/default/refuser:http", `document.querySelector(".p-refused tbody tr")`)
	p.fits("the page of a service that refuses at 360 px")
	p.shoot("refused-service-360", wholePage)
	stop()

	must(t)(nil, os.Remove(m.Path(w.manifests)))
	p.run(chromedp.EmulateViewport(1440, 900))
	m = w.manifest("slow", 42)
	m.Ports = m.Ports[:1]
	must(t)(nil, m.Write(w.manifests))
	t.Cleanup(func() { _ = os.Remove(m.Path(w.manifests)) })
	p.visit("#/service/default/slow:line", pages[1].ready)
	pin("slow", "line")
	p.eventually("it is served in userspace", `document.querySelector('.service-title [data-plane="userspace"]')`)
	defer w.ask(netip.MustParseAddrPort("10.96.0.42:80"))()
	p.eventually("connects to its endpoints are timed", `[...document.querySelectorAll(".endpoints-table tbody tr")].filter((e) => /[\d.]+ m?sat most [\d.]+ m?s/.test(e.textContent)).length === 3`)
}
