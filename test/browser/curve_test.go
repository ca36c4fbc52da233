package browser

import (
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// TestCurve: connections over time are drawn by data plane, with marks, and their values
// are said to keyboard, pointer and in a table.
func TestCurve(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1360, 900)
	p.eventually("new connections of the kernel's data plane are drawn", `document.querySelector('.curve .over[data-plane="nftables"]')`)
	p.eventually("the offload is marked", `document.querySelector(".curve .mark")`)
	const slider, said = `document.querySelector(".curve-slider")`, `document.querySelector(".curve-said").textContent`
	p.eventually("the latest values are said", said+`.includes("nftables") && `+said+`.includes("new/s") && `+said+`.includes("0 failed/s")`)
	before := eval[string](p, said)
	eval[bool](p, `(`+slider+`.focus(), true)`)
	p.press(kb.ArrowLeft, kb.ArrowLeft)
	if now := eval[string](p, said); now == before || now != eval[string](p, slider+`.getAttribute("aria-valuetext")`) {
		t.Errorf("two steps back it says %q, at the end %q", now, before)
	}
	eval[bool](p, `(() => { const b = document.querySelector(".curve").getBoundingClientRect(); return document.querySelector(".curve").dispatchEvent(new PointerEvent("pointermove", { clientX: b.left + 1, clientY: b.top + 5 })) })()`)
	if at := eval[string](p, slider+`.value`); at != "0" {
		t.Errorf("a pointer at the left edge leads to step %s", at)
	}
	eval[bool](p, `([...document.querySelectorAll(".curve-tools button")].find((b) => b.textContent === "5 min").click(), document.querySelector(".curve-table").open = true)`)
	p.eventually("five minutes are thirty steps, and a table says them", `document.querySelectorAll(".curve-table tbody tr").length === 30 && document.querySelector(".curve-tools [aria-pressed=true]").textContent === "5 min"`)
	p.eventually("with the offload", `document.querySelector(".curve-table").textContent.includes("userspace to nftables")`)
	p.shoot("curve-1360", wholePage)
	p.run(chromedp.EmulateViewport(360, 740))
	p.fits("the curve at 360 px")
}
