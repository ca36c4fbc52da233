package browser

import (
	"context"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// foreign is a name that the browser believes leads to this machine's loopback
// interface, as a page on the Internet could make any browser believe.
const foreign = "evil.example"

// browser is one Chromium for the whole run, started when it is first needed.
type browser struct {
	once sync.Once
	ctx  context.Context
	stop func()
	err  error
}

var chromium = browser{stop: func() {}}

func (b *browser) context() (context.Context, error) {
	b.once.Do(func() {
		program, err := exec.LookPath("chromium")
		if err != nil {
			b.err = fmt.Errorf("%w; test/setup.sh test installs it", err)
			return
		}
		options := append([]chromedp.ExecAllocatorOption{}, chromedp.DefaultExecAllocatorOptions[:]...)
		options = append(options,
			chromedp.ExecPath(program),
			chromedp.NoSandbox, // which root can't have
			chromedp.Flag("host-resolver-rules", "MAP "+foreign+" 127.0.0.1"),
			chromedp.Flag("force-color-profile", "srgb"),
			chromedp.Flag("hide-scrollbars", false),
		)
		allocator, stopAllocator := chromedp.NewExecAllocator(context.Background(), options...)
		ctx, cancel := chromedp.NewContext(allocator)
		b.stop = func() { cancel(); stopAllocator() }
		b.ctx, b.err = ctx, chromedp.Do(ctx) // with nothing to do, this starts it
	})
	return b.ctx, b.err
}

// tab is a page of the browser with nothing of other tabs in it. The test fails
// when the page complains in its console, be it about its own code, what the
// Content-Security-Policy forbids, or what couldn't be loaded.
type tab struct {
	*testing.T
	ctx context.Context
	*console
}

// in is the same tab for a subtest.
func (p *tab) in(t *testing.T) *tab { return &tab{T: t, ctx: p.ctx, console: p.console} }

// console collects what a page complains about.
type console struct {
	mu         sync.Mutex // the browser's events come from another goroutine
	complaints []string
	forgiven   string // no complaint, where it is in one; empty for none
}

// open opens a page that is width by height pixels, and waits until it shows
// something.
func open(t *testing.T, url string, width, height int64) *tab {
	t.Helper()
	p := blank(t)
	p.run(chromedp.EmulateViewport(width, height), chromedp.Navigate(url))
	p.eventually("the page shows what kproxy does", `!document.querySelector("#starting") || document.querySelector("#starting").hidden`)
	eval[bool](p, `window.opened = true`) // gone after a reload
	return p
}

// blank opens a tab with nothing in it.
func blank(t *testing.T) *tab {
	t.Helper()
	parent, err := chromium.context()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := chromedp.NewContext(parent, chromedp.WithNewBrowserContext())
	ctx, expire := context.WithTimeout(ctx, 5*time.Minute)
	p := &tab{T: t, ctx: ctx, console: &console{}}
	t.Cleanup(func() {
		if t.Failed() {
			p.shoot("failed-"+strings.ReplaceAll(t.Name(), "/", "-"), chromedp.CaptureScreenshot())
		}
		p.quiet()
		expire()
		cancel()
	})
	go p.console.listen(chromedp.Console(ctx))
	p.prefers("light")
	return p
}

// listen keeps what the page complains about, until its tab closes.
func (c *console) listen(messages iter.Seq2[chromedp.ConsoleMessage, error]) {
	for m, err := range messages {
		if err != nil {
			return
		}
		if m.Type == chromedp.ConsoleError || m.Type == chromedp.ConsoleException {
			c.add(fmt.Sprintf("%s %s: %s (%s)", m.Source, m.Type, m.Text, m.URL))
		}
	}
}

func (c *console) add(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.forgiven == "" || !strings.Contains(text, c.forgiven) {
		c.complaints = append(c.complaints, text)
	}
}

func (c *console) forgive(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgiven = text
}

// take returns the complaints, and forgets them.
func (c *console) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.complaints
	c.complaints = nil
	return out
}

// quiet fails the test if the page complained, and forgets it.
func (p *tab) quiet() {
	p.Helper()
	for _, c := range p.take() {
		p.Errorf("the page complains: %s", c)
	}
}

func (p *tab) run(steps ...chromedp.Action[chromedp.Void]) {
	p.Helper()
	if err := chromedp.Do(p.ctx, steps...); err != nil {
		p.Fatal(err)
	}
}

// eval returns the value of a JavaScript expression; that of a promise if it is one.
func eval[T any](p *tab, expression string) T {
	p.Helper()
	v, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		p.Fatalf("evaluate %s: %v", expression, err)
	}
	return v
}

// patience is how long something may take that happens by itself, in a second or
// two on a machine that does nothing else.
const patience = time.Minute

// eventually waits until a JavaScript expression is true.
func (p *tab) eventually(what, expression string) {
	p.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		yes, err := chromedp.Run(p.ctx, chromedp.Evaluate[bool]("Boolean("+expression+")"))
		if yes {
			return
		}
		if time.Now().After(deadline) || p.ctx.Err() != nil {
			p.Fatalf("it didn't happen that %s: %s (%v)", what, expression, err)
		}
	}
}

// press presses keys, one after the other. A key that writes something does so as part
// of its going down, so that a page that takes the key for itself keeps it from
// being written, as it does with a real keyboard.
func (p *tab) press(keys ...string) {
	p.Helper()
	for _, r := range strings.Join(keys, "") {
		events := kb.Encode(r)
		if len(events) == 3 {
			events[0].Text, events[0].UnmodifiedText = events[1].Text, events[1].UnmodifiedText
			events = slices.Delete(events, 1, 2)
		} else {
			events[0].Type = input.DispatchKeyEventTypeRawKeyDown
		}
		for _, e := range events {
			if _, err := chromedp.Call(p.ctx, input.DispatchKeyEvent, *e); err != nil {
				p.Fatal(err)
			}
		}
	}
}

// wholePage is a picture of all that one could scroll to.
var wholePage = chromedp.FullScreenshot(100)

// shoot writes a picture of the page to the artefacts.
func (p *tab) shoot(name string, picture chromedp.Action[[]byte]) {
	p.Helper()
	png, err := chromedp.Run(p.ctx, picture)
	if err == nil {
		err = os.WriteFile(filepath.Join(artifacts, name+".png"), png, 0o644)
	}
	if err != nil {
		p.Errorf("screenshot %s: %v", name, err)
	}
}
