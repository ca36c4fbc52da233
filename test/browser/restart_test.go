package browser

import "testing"

// TestPageOutlivesKproxy restarts kproxy under an open page.
func TestPageOutlivesKproxy(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1280, 900)
	p.eventually("it is live", row("default/web:line", `.pill[data-plane="iptables"]`))
	p.forgive("/api/v1/") // the browser complains that nobody answers
	if err := w.proxy.Kill(); err != nil {
		t.Fatal(err)
	}
	p.eventually("the page says that it isn't live, and keeps what it knew",
		`document.querySelector("#banners").textContent.includes("Not live") && `+row("default/web:line", ""))
	if err := w.again(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.eventually("it is live again, by itself", `document.querySelector("#chip-live").textContent.trim() === "live" && document.querySelector("#banners").textContent === ""`)
	p.eventually("and follows", `Number(`+row("default/web:line", `.c-rate .number`)+`?.textContent) > 3`)
	if !eval[bool](p, `window.opened === true`) {
		t.Error("the page was reloaded")
	}
}
