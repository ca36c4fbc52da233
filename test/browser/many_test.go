package browser

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"kproxy.dev/kproxy/lab"
)

// many is how many Services a big cluster has here, each of one port and three
// endpoints.
const many = 5000

// writeMany writes their manifests: svc-0000 and up, in ten namespaces. Nobody is
// at their endpoints, so nothing may ask how these are.
func writeMany(dir string) error {
	var b strings.Builder
	for i := range many {
		m := lab.Manifest{
			Namespace: fmt.Sprintf("team-%d", i%10), Name: fmt.Sprintf("svc-%04d", i),
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 100, byte(i >> 8), byte(i)})},
			Ports:      []lab.ManifestPort{{Name: "http", Port: 80, Target: 8080}},
		}
		for e := range 3 {
			m.Endpoints = append(m.Endpoints, lab.ManifestEndpoint{
				Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, byte(50 + e), byte(i >> 8), byte(i)})}, Weight: 1,
			})
		}
		b.WriteString(m.YAML())
		b.WriteString("---\n")
	}
	return os.WriteFile(filepath.Join(dir, "many.yaml"), []byte(b.String()), 0o644)
}

func TestManyServices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	w, err := newWorld(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the tab has closed
		if err := w.stop(); err != nil {
			t.Error(err)
		}
	})
	if err := writeMany(w.manifests); err != nil {
		t.Fatal(err)
	}
	if err := w.start(ctx, "--mode", "userspace", "--health-check", "off"); err != nil {
		t.Fatal(err)
	}
	p := blank(t)
	must(t)(chromedp.Call(p.ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: firstRow}))
	p.run(chromedp.EmulateViewport(1280, 800), chromedp.Navigate(w.url("localhost")))
	p.eventually("services are listed", `window.firstRow`)
	paint := eval[float64](p, `performance.getEntriesByName("first-contentful-paint")[0].startTime`)
	rows := eval[float64](p, `window.firstRow`)
	p.figure("%d services: first paint after %.0f ms, their list after %.0f ms", many, paint, rows)
	p.eventually("all are counted", `document.querySelector(".shown").textContent.includes("5,000 service ports")`)
	p.scrolls()
	p.searches()
}

// firstRow notes when the first service was painted, in milliseconds after the
// navigation began.
const firstRow = `(function wait() {
  requestAnimationFrame(() => { document.querySelector(".rows [data-key]") ? setTimeout(() => { window.firstRow = performance.now() }) : wait() });
})()`

// figure notes what was measured in the log and the artefacts. It depends on what
// else the machine does, so no test fails for it.
func (p *tab) figure(format string, args ...any) {
	p.Helper()
	p.Logf(format, args...)
	f, err := os.OpenFile(filepath.Join(artifacts, "figures.txt"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = fmt.Fprintf(f, format+"\n", args...)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		p.Error(err)
	}
}

// must returns a function that fails the test for an error.
func must(t *testing.T) func(any, error) {
	return func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// inDocument counts the rows in the document, which must be about as many as can be seen.
func (p *tab) inDocument() int {
	p.Helper()
	n := eval[int](p, `document.querySelectorAll(".rows [data-key]").length`)
	if n < 5 || n > 120 {
		p.Errorf("%d rows are in the document, want as many as are near what can be seen", n)
	}
	return n
}

// scrolls goes through the list by keys and by steps of a wheel.
func (p *tab) scrolls() {
	p.Helper()
	p.inDocument()
	eval[bool](p, `document.querySelector('.rows [tabindex="0"]').focus() ?? true`)
	p.press(kb.End)
	p.eventually("End leads to the last service", `document.activeElement.dataset.key === "team-9/svc-4999:http"`)
	p.inDocument()
	p.press(kb.PageUp, kb.ArrowUp)
	p.eventually("the arrows lead on from there", `document.activeElement.dataset.key.startsWith("team-9/") && document.activeElement.dataset.key < "team-9/svc-4999"`)
	p.press(kb.Home)
	p.eventually("Home leads to the first", `document.activeElement.dataset.key === "team-0/svc-0000:http"`)

	frames := eval[[]float64](p, `new Promise((done) => {
	  const times = [], step = document.documentElement.scrollHeight / 60;
	  let last = performance.now(), n = 0;
	  requestAnimationFrame(function frame(now) {
	    times.push(now - last); last = now;
	    if (++n > 60) return done(times.slice(1).sort((a, b) => a - b));
	    scrollBy({ top: step, behavior: "instant" });
	    requestAnimationFrame(frame);
	  });
	})`)
	p.inDocument()
	if len(frames) != 60 {
		p.Fatalf("%d frames", len(frames))
	}
	p.figure("scrolling through all in 60 steps: median frame %.0f ms, 95th percentile %.0f ms, longest %.0f ms", frames[30], frames[57], frames[59])
	p.eventually("the last service is in sight", row("team-9/svc-4999:http", ""))
}

// searches finds one among all, by name, address and filter.
func (p *tab) searches() {
	p.Helper()
	only := func(key string) string {
		return fmt.Sprintf(`document.querySelectorAll(".rows [data-key]").length === 1 && %s`, row(key, ""))
	}
	find := func(text string) {
		p.press(kb.Escape, kb.Escape) // clears what was searched for
		eval[bool](p, `(document.activeElement.blur(), true)`)
		p.press("/")
		p.eventually("the search has the focus", `document.activeElement.id === "search" && document.activeElement.value === ""`)
		p.press(text)
	}
	find("svc-4321")
	p.eventually("a name is found", only("team-1/svc-4321:http"))
	find("10.100.16.225")
	p.eventually("an address is found", only("team-1/svc-4321:http"))
	find("no such thing")
	p.eventually("nothing is found, and that is said", `!document.querySelector(".empty").hidden && document.querySelector(".empty").textContent.includes("No service port matches")`)
	p.press(kb.Escape)
	p.eventually("Escape shows all again", `document.querySelector(".shown").textContent.startsWith("5,000 service")`)
	eval[string](p, `location.hash = "#/?plane=ipvs"`)
	p.eventually("a filter leaves out what it should", `document.querySelector(".shown").textContent.startsWith("0 of 5,000")`)
	eval[string](p, `location.hash = "#/"`)
	p.eventually("the state filter counts what it leaves", `[...document.querySelector("#filter-state").options].some((o) => !o.hidden && o.textContent.endsWith(" (5,000)"))`)
	eval[bool](p, `(document.querySelector('.station[data-plane="userspace"]').click(), true)`)
	p.eventually("and keeps the rest", `document.querySelector(".shown").textContent.startsWith("5,000 of 5,000")`)
}
