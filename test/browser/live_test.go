package browser

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/web"
)

// liveLab is a lab that most tests look at: three backends, the service web,
// which is in the kernel, and a client that asks all the time. It is built when it
// is first needed.
type liveLab struct {
	once    sync.Once
	w       *world
	traffic func()
	err     error
}

var shared liveLab

func (l *liveLab) world(t *testing.T) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	l.once.Do(func() { l.err = l.build() })
	if l.err != nil {
		t.Fatal(l.err)
	}
	return l.w
}

func (l *liveLab) build() error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	w, err := newWorld(ctx, 3)
	if err != nil {
		return err
	}
	l.w = w
	m := w.manifest("web", 10)
	m.Type, m.Ports[0].NodePort = "NodePort", 30080
	if err := errors.Join(m.Write(w.manifests), lab.NewManifest("lonely", 11).Write(w.manifests)); err != nil {
		return err
	}
	err = w.start(ctx, "--mode", "nftables", "--offload-after", "1s", "--health-interval", "300ms", "--health-timeout", "250ms", "--grafana-url", "https://grafana.example")
	l.traffic = w.ask(netip.MustParseAddrPort("10.96.0.10:80"))
	return err
}

func (l *liveLab) stop() {
	if l.w == nil {
		return
	}
	if l.traffic != nil {
		l.traffic()
	}
	if err := l.w.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "take the lab down:", err)
	}
}

// manifest is a service of all backends.
func (w *world) manifest(name string, number int) lab.Manifest {
	return lab.NewManifest(name, number, w.net.Backends...)
}

// ask has the client connect to an address ten times a second, until the returned
// function is called.
func (w *world) ask(address netip.AddrPort) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				_, _ = w.net.Client.Ask(ctx, "tcp", address, "hello") // what comes of it, the dashboard shows
			}
		}
	}()
	return func() { cancel(); <-done }
}

// row is a CSS selector for what belongs to a service port in the overview.
func row(key, inside string) string {
	return fmt.Sprintf(`document.querySelector('.rows [data-key="%s"] %s')`, key, inside)
}

func TestOverviewFollows(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1600, 1000)
	const key = "default/shop:line"
	m := w.manifest("shop", 20)
	if err := m.Write(w.manifests); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(m.Path(w.manifests)) })
	p.eventually("a new service appears, in userspace", row(key, `.pill[data-plane="userspace"]`))

	stop := w.ask(netip.MustParseAddrPort("10.96.0.20:80"))
	defer stop()
	p.eventually("it is offloaded", row(key, `.pill[data-plane="nftables"]`))
	p.eventually("the timeline says so", timelineSays("default/shop:line", "userspace to nftables"))
	p.eventually("new connections are counted", `Number(`+row(key, `.c-rate .number`)+`?.textContent) > 3`)

	t.Run("killed backend", func(t *testing.T) {
		p := p.in(t)
		b := w.net.Backend("b2")
		up := eval[[]int](p, colour(row(key, `.dot[data-health="up"]`)))
		b.Stop()
		t.Cleanup(func() {
			if err := b.Start(t.Context()); err != nil && t.Context().Err() == nil {
				t.Error(err)
			}
		})
		p.eventually("its endpoint is down", row(key, `.dot[data-health="down"]`))
		down := eval[[]int](p, colour(row(key, `.dot[data-health="down"]`)))
		if !(down[0] > 120 && down[0] > 2*down[1] && up[1] > up[0]) {
			t.Errorf("colours: up is %v, down is %v; want green and red", up, down)
		}
		address := b.Address(false, lab.LinePort).String()
		p.eventually("the row says it in words", row(key, `.c-endpoints`)+`?.textContent.includes("down")`)
		p.eventually("the timeline says so", timelineSays("default/shop:line", address+" is down"))
	})
	p.eventually("it is up again", `!`+row(key, `.dot[data-health="down"]`))

	t.Run("recall", func(t *testing.T) {
		p := p.in(t)
		if _, err := w.client.Pin(t.Context(), web.PinRequest{Namespace: "default", Name: "shop", Port: "line", Preference: "userspace"}); err != nil {
			t.Fatal(err)
		}
		p.eventually("it is pinned in userspace", row(key, `.pill[data-plane="userspace"]`)+` && `+row(key, `[data-state="pinned"]`))
		p.eventually("the timeline says so", timelineSays("default/shop:line", "nftables to userspace"))
	})

	if err := os.Remove(m.Path(w.manifests)); err != nil {
		t.Fatal(err)
	}
	p.eventually("a removed service goes", `!`+row(key, ""))
	if !eval[bool](p, `window.opened === true && performance.getEntriesByType("navigation").length === 1`) {
		t.Error("the page was reloaded")
	}
}

func TestServicePage(t *testing.T) {
	w := shared.world(t)
	held, err := lab.Hold(t.Context(), lab.HoldConfig{From: w.net.Client, Network: "tcp", Target: netip.MustParseAddrPort("10.96.0.10:80")})
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	p := open(t, w.url("localhost"), 1280, 900)
	p.visit(pages[1].hash, pages[1].ready)
	in := func(inside string) string {
		return `document.querySelector('#page-service:not([hidden]) ` + inside + `')`
	}
	p.eventually("the tab says which page it is", `document.title === "default/web:line · kproxy · node"`)
	p.eventually("it says where connections go", in("h1")+`.textContent === "default/web:line" && `+in(`.service-title [data-plane="nftables"]`))
	p.eventually("the endpoints have a history", in(`.endpoints-table [data-health="up"] .strip rect`))
	p.eventually("the open connection is listed", in(".p-connections tbody")+`?.textContent.includes("`+held.LocalAddr().String()+`")`)
	p.eventually("the offload is in its timeline", timelineSays("", "userspace to nftables"))
	p.eventually("its way is drawn", in(".drawing svg")+`?.textContent.includes("10.2.0.2:9000")`)
	p.eventually("the rate of all clients stands at the service's box", `[...document.querySelectorAll(".drawing svg .box[data-plane].taken .detail")].some((e) => e.textContent.endsWith(" new/s in all"))`)
	if eval[bool](p, `[...document.querySelectorAll(".drawing svg .edge-label")].some((e) => e.textContent.includes("new/s"))`) {
		t.Error("it stands at the client as well")
	}
	eval[bool](p, `(`+in(".real-rules summary")+`.click(), true)`)
	p.eventually("the rules are the kernel's", in(".real-rules .rules code")+` && [...document.querySelectorAll(".real-rules code")].some((c) => c.textContent.includes("map @backends"))`)
	p.eventually("the story names the service's chain", in(".story")+`.textContent.includes("(pick-3)")`)
	p.shoot("service-rules-1280", wholePage)
	p.eventually("Grafana's dashboard of the service is a link away", `document.querySelector("#grafana:not([hidden])")?.href === "https://grafana.example/d/kproxy?var-instance=node&var-namespace=default&var-service=web"`)
	p.eventually("so is the page about its data plane, which kproxy has with it", in(`.p-explain a[href="/docs/nftables.md"]`)+` && fetch("/docs/nftables.md").then((r) => r.ok)`)
}

// TestRulesCount: iptables' rules have counters, and the page follows them.
func TestRulesCount(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	w, err := newWorld(ctx, 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.stop(); err != nil {
			t.Error(err)
		}
	})
	must(t)(nil, w.manifest("web", 10).Write(w.manifests))
	must(t)(nil, w.start(ctx, "--mode", "iptables", "--offload-after", "1s"))
	defer w.ask(netip.MustParseAddrPort("10.96.0.10:80"))()
	p := open(t, w.url("localhost"), 1280, 900)
	p.visit("#/service/default/web:line", `document.querySelector('.service-title [data-plane="iptables"]')`)
	const rules = `document.querySelector(".real-rules")`
	eval[bool](p, `(`+rules+`.querySelector("summary").click(), true)`)
	p.eventually("the rules are the kernel's", `[...document.querySelectorAll(".real-rules code")].some((c) => c.textContent.includes("-j DNAT --to-destination 10.2.0."))`)
	before := eval[string](p, rules+`.textContent`)
	p.eventually("their counters count", fmt.Sprintf(rules+`.textContent !== %q`, before))
}

// TestVerdict: what doesn't answer is said first, in the words of `kproxy status`, and is
// one click away.
func TestVerdict(t *testing.T) {
	w := shared.world(t)
	m := w.manifest("zzz", 40)                                        // last by name
	m.Ports = []lab.ManifestPort{{Name: "http", Port: 80, Target: 9}} // where nothing listens
	must(t)(nil, m.Write(w.manifests))
	t.Cleanup(func() { _ = os.Remove(m.Path(w.manifests)) })
	p := open(t, w.url("localhost"), 1280, 900)
	part := func(condition string) string {
		return fmt.Sprintf(`document.querySelector('.verdict [data-condition="%s"]')`, condition)
	}
	p.eventually("the verdict says what doesn't answer", part("unanswered")+`.textContent === "1 service port doesn't answer"`)
	p.eventually("and what has nothing behind it", part("vacant")+`.textContent === "3 have no endpoint here"`)
	p.eventually("what is broken comes first", `document.querySelector(".rows .row").dataset.key === "default/zzz:http"`)
	p.eventually("with the cause", row("default/zzz:http", ".c-why")+`.textContent.includes(":9 is down: connect: connection refused")`)
	p.eventually("the tab says the worst of it", `document.title === "1 service port doesn't answer · kproxy · node"`)
	st, err := w.client.Status(t.Context())
	must(t)(nil, err)
	said := eval[string](p, `[...document.querySelectorAll(".verdict button")].filter((b) => !b.hidden).map((b) => b.textContent).join(", ")`)
	if want := st.Verdict(); !strings.EqualFold(said, want) {
		t.Errorf("the page says %q, status %q", said, want)
	}
	p.shoot("verdict-1280", wholePage)
	eval[bool](p, `(`+part("unanswered")+`.click(), true)`)
	p.eventually("a click leaves only those", `document.querySelectorAll(".rows .row").length === 1 && location.hash === "#/?condition=unanswered"`)
	eval[bool](p, `(`+part("unanswered")+`.click(), true)`)
	p.eventually("another one shows all", `document.querySelectorAll(".rows .row").length > 5`)
	eval[string](p, `location.hash = "#/?hide=why,rate&sort=name"`)
	p.eventually("the address chooses columns and order", `!document.querySelector(".c-why").checkVisibility() && document.querySelector(".c-name").checkVisibility() && document.querySelector(".rows .row").dataset.key === "default/lonely:datagram"`)

	p.visit("#/service/default/zzz:http", `document.querySelector('.endpoints-table .strip rect[data-health="down"]')`)
	p.eventually("how long an endpoint was down, and of what", `/down once, \d+ s: refused/.test(document.querySelector(".strip-cell").textContent)`)

	p.run(chromedp.EmulateViewport(360, 740))
	eval[string](p, `location.hash = "#/"`)
	p.eventually("on a phone services come first", `scrollTo(0, 0) || document.querySelector(".rows .row").getBoundingClientRect().bottom <= innerHeight`)

	if err := os.Remove(m.Path(w.manifests)); err != nil {
		t.Fatal(err)
	}
	p.eventually("what is well again leaves the verdict", part("unanswered")+`.hidden`)
}

func TestNodePage(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1280, 900)
	p.visit(pages[2].hash, pages[2].ready)
	says := func(text string) string {
		return fmt.Sprintf(`document.querySelector("#page-node").textContent.includes(%q)`, text)
	}
	for _, text := range []string{"nftables", "local traffic detector", w.manifests, " entries"} {
		p.eventually("it names "+text, says(text))
	}
	if err := os.WriteFile(w.manifests+"/broken.yaml", []byte("kind: Service\napiVersion: v1\nmetadata: {name: UPPER}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(w.manifests + "/broken.yaml")
	p.eventually("an error of a source is shown, with its place", says("broken.yaml"))
}

// timelineSays is a JavaScript expression: an entry of the timeline in sight has
// both texts.
func timelineSays(service, text string) string {
	return fmt.Sprintf(`[...document.querySelectorAll(".page:not([hidden]) .timeline li")].some((li) => li.textContent.includes(%q) && li.textContent.toLowerCase().includes(%q))`, service, text)
}

// colour is a JavaScript expression for the red, green and blue of an element.
func colour(element string) string {
	return `(() => { const c = new OffscreenCanvas(1, 1).getContext("2d"); c.fillStyle = getComputedStyle(` + element + `).color; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3) })()`
}

// TestPageOutlivesKproxy restarts kproxy under an open page.
func TestPageOutlivesKproxy(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1280, 900)
	p.eventually("it is live", row("default/web:line", `.pill[data-plane="nftables"]`))
	p.forgive("/api/v1/") // the browser complains that nobody answers
	if err := w.proxy.Kill(); err != nil {
		t.Fatal(err)
	}
	p.eventually("the page says that it isn't live, and keeps what it knew",
		`document.querySelector("#banners").textContent.includes("Not live") && `+row("default/web:line", ""))
	p.eventually("so does the tab", `document.title === "Not live · kproxy · node"`)
	if err := w.again(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.eventually("it is live again, by itself", `document.querySelector("#chip-live").textContent.trim() === "live" && document.querySelector("#banners").textContent === ""`)
	p.eventually("and follows", `Number(`+row("default/web:line", `.c-rate .number`)+`?.textContent) > 3`)
	if !eval[bool](p, `window.opened === true`) {
		t.Error("the page was reloaded")
	}
}
