package browser

import (
	"fmt"
	"slices"
	"testing"

	"github.com/chromedp/chromedp/kb"
)

// focus describes the element that has the keyboard's focus.
type focus struct {
	Name    string // for people: its label, or its text
	Role    string // its tag, and role if it has one
	Visible bool   // it is in sight, and shows that it has the focus
	Why     string // if not
}

// focused describes what has the focus. It is in sight when some point of it is
// at the top of what is painted there, and shows the focus by an outline or a shadow.
func (p *tab) focused() focus {
	p.Helper()
	return eval[focus](p, `(() => {
	  const e = document.activeElement, outside = () => { const r = e.getBoundingClientRect(); return r.bottom < 0 || r.top > innerHeight; };
	  // The page is alive: what grew since Tab was pressed may have pushed it out again. It counts where the focus brings it.
	  if (outside()) { e.blur(); e.focus({ focusVisible: true }); }
	  const r = e.getBoundingClientRect(), s = getComputedStyle(e);
	  const out = { Name: (e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent || e.id).trim().replace(/\s+/g, " ").slice(0, 60), Role: e.tagName.toLowerCase() + (e.getAttribute("role") ? " " + e.getAttribute("role") : ""), Visible: true, Why: "" };
	  const no = (why) => { out.Visible = false; out.Why = why; };
	  if (e === document.body) return out;
	  const marked = (s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 1) || s.boxShadow !== "none";
	  if (!marked) no("no outline and no shadow");
	  if (r.width < 2 || r.height < 2) no("it is " + r.width + " by " + r.height);
	  const y = Math.min(Math.max(r.top + r.height / 2, 1), innerHeight - 1);
	  const tops = [0.1, 0.5, 0.9].map((at) => document.elementFromPoint(Math.min(Math.max(r.left + r.width * at, 1), innerWidth - 1), y));
	  if (outside()) no("it is not in the window");
	  else if (!tops.some((top) => e.contains(top) || top?.contains(e))) no("covered by " + tops[1]?.outerHTML.slice(0, 80));
	  return out;
	})()`)
}

// tabThrough presses Tab until the focus is back at the start, and returns all
// that had it.
func (p *tab) tabThrough(where string) []focus {
	p.Helper()
	var seen []focus
	eval[bool](p, `(scrollTo(0, 0), document.querySelector("#skip").focus({ focusVisible: true }), true)`) // the first stop
	seen = append(seen, p.focused())
	for range 120 {
		p.press(kb.Tab)
		f := p.focused()
		if f.Role == "body" || len(seen) > 3 && f.Name == seen[0].Name && f.Role == seen[0].Role {
			return seen
		}
		if !f.Visible {
			p.Errorf("%s: the focus on %s %q can't be seen: %s", where, f.Role, f.Name, f.Why)
		}
		seen = append(seen, f)
	}
	p.Errorf("%s: after %d Tabs the focus isn't back at the start", where, len(seen))
	return seen
}

func TestKeyboard(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1280, 900)
	for _, page := range pages {
		p.visit(page.hash, page.ready)
		seen := p.tabThrough(page.name)
		var names []string
		for _, f := range seen {
			names = append(names, fmt.Sprintf("%s %q", f.Role, f.Name))
		}
		t.Logf("%s: %d stops: %s", page.name, len(seen), names)
		p.everythingIsReached(page.name)
	}

	// From the list to a service and back, and around by keys alone.
	p.visit(pages[0].hash, pages[0].ready)
	p.press("/")
	p.eventually("/ leads to the search, and isn't written there", `document.activeElement.id === "search" && document.activeElement.value === ""`)
	p.press("web:line")
	p.eventually("it is found", `document.querySelectorAll(".rows [data-key]").length === 1`)
	for range 20 {
		if eval[bool](p, `document.activeElement.matches(".row")`) {
			break
		}
		p.press(kb.Tab)
	}
	p.press(kb.Enter)
	p.eventually("Enter opens the service", pages[1].ready)
	p.press(kb.Escape)
	p.eventually("Escape leads back, to where it was", `document.activeElement.matches('.row[data-key="default/web:line"]')`)
	p.press(kb.Escape)
	p.eventually("and then clears the search", `document.querySelectorAll(".rows [data-key]").length > 1`)
	p.press("g", "n")
	p.eventually("g n leads to the node", pages[2].ready)
	p.press("?")
	p.eventually("? opens the help", `document.querySelector("#help").open`)
	p.press(kb.Escape)
	p.eventually("Escape closes it", `!document.querySelector("#help").open && location.hash === "#/node"`)
	p.press("g", "o")
	p.eventually("g o leads to the services", pages[0].ready)
}

// TestKeysOfAFreshPage: nothing has the focus yet, and the search gives it back.
func TestKeysOfAFreshPage(t *testing.T) {
	w := shared.world(t)
	p := open(t, w.url("localhost"), 1280, 900)
	p.eventually("services are listed", pages[0].ready)
	inList := `document.activeElement.matches(".row")`
	p.press(kb.ArrowDown)
	p.eventually("an arrow leads to the first service", inList+` && document.activeElement === document.querySelector(".rows [data-key]")`)
	p.press(kb.ArrowDown)
	p.eventually("another one to the second", inList+` && document.activeElement.dataset.key === document.querySelectorAll(".rows [data-key]")[1].dataset.key`)
	p.press(kb.Enter)
	p.eventually("Enter opens it", `location.hash.startsWith("#/service/")`)
	p.press(kb.Escape)
	p.eventually("Escape leads back", inList)

	p.press("/", "nothing is called so")
	p.eventually("nothing is found", `document.querySelectorAll(".rows [data-key]").length === 0 || document.querySelector(".list").hidden`)
	p.press(kb.Escape)
	p.eventually("Escape clears the search, and leads to the list", inList+` && document.querySelector("#search").value === ""`)
	p.press("/")
	p.eventually("/ leads to the search", `document.activeElement.id === "search"`)
	p.press(kb.Escape, "?")
	p.eventually("after Escape, ? opens the help", `document.querySelector("#help").open && document.querySelector("#search").value === ""`)
}

// everythingIsReached checks that what can be clicked can have the focus: all
// there is must be a stop of Tab, or lie in a part that arrows walk through.
func (p *tab) everythingIsReached(where string) {
	p.Helper()
	left := eval[[]string](p, `[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [onclick], [role=button], [role=tab], [role=link]")]
	  .filter((e) => e.tabIndex < 0 && !e.disabled && e.checkVisibility() && !e.closest("[role=grid], [role=tablist], [role=toolbar], [role=radiogroup], dialog:not([open])"))
	  .map((e) => e.outerHTML.slice(0, 100))`)
	if len(left) > 0 {
		p.Errorf("%s: Tab doesn't reach %s", where, slices.Compact(left))
	}
}
