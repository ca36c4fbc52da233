package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/agent/takeover"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service/lockfile"
	"kproxy.dev/kproxy/userspace/handover"
)

// leave ends an Agent that hasn't served.
func (a *Agent) leave(err error) error {
	if a.from.Pending() && a.userspace != nil {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		_ = a.userspace.Drain(now)
	}
	return err
}

// inherit listens with the predecessor's listeners. Where its rules are made for something else, so that both can't
// be one after the other without a moment between, it is asked to end.
func (a *Agent) inherit() error {
	w := a.from.Welcome
	tcp, udp := uint16(w.TCPPort), uint16(w.UDPPort)
	if p := uint16(a.cfg.ListenTCPPort); p != 0 {
		tcp = p
	}
	if p := uint16(a.cfg.ListenUDPPort); p != 0 {
		udp = p
	}
	if want := a.madeFor(tcp, udp); w.Steering != want {
		if err := a.from.Tell(handover.End); err != nil {
			return err
		}
		return fmt.Errorf("%w: its rules are for %s, these for %s; it was asked to end", takeover.ErrNotTakenOver, w.Steering, want)
	}
	own, err := a.from.Listeners()
	if err != nil {
		return err
	}
	return a.userspace.Inherit(w.Listeners, own)
}

// pausePredecessor has the predecessor leave the kernel alone from now on, and takes what it knows of endpoints.
func (a *Agent) pausePredecessor() error {
	paused, files, err := a.from.Pause()
	if err != nil {
		return err
	}
	a.healths.Inherit(paused.Files, files)
	a.prober.Resume(plan.Targets(a.source.Latest(), a.health, a.policyNow().ExcludeCIDRs...), takeover.HealthIn(paused.Health))
	return a.orders.Open(a.cfg.StateDir) // it may have written some since
}

// takeOver takes what the predecessor's userspace carries; first is the first plan.
func (a *Agent) takeOver(first *plan.Plan) error {
	a.userspace.Prepare(first, plan.Between(nil, first))
	a.uncommitted = true
	resume := pauseCollector()
	defer func() {
		if a.from.Pending() {
			resume()
		}
	}()
	began := time.Now()
	given, files, err := a.from.Give()
	if err != nil {
		return err
	}
	if err := a.userspace.TakeOver(&given.Userspace, files); err != nil {
		return fmt.Errorf("%w: %w", takeover.ErrNotTakenOver, err)
	}
	a.userspace.Confirm() // first: a crash right after CONFIRM would leave nothing to go on with
	if err := a.from.Tell(handover.Confirm); err != nil {
		return err
	}
	a.serves = func() {
		resume()
		a.log.Info("took over from the kproxy that ran", "connections were at rest for", time.Since(began).Round(time.Microsecond).String(), "descriptors", len(files))
	}
	if err := lockfile.WritePID(a.lock); err != nil {
		a.log.Warn("the node's lock names the process that ran before", "error", err)
	}
	a.programmer.steeringReady() // the rules are the predecessor's
	a.options.TookOver()
	return nil
}

// freezeBound returns how long connections are at rest at worst, before they go on here. The heartbeat rests as well,
// from up to a third of its time-out after the last beat: new connections wait meanwhile, and nothing is taken for dead.
func (a *Agent) freezeBound() time.Duration { return a.cfg.AliveTimeout / 2 }

// turn lets one at a time in: a pass that programs the kernel, or a successor that keeps passes from it.
type turn chan struct{}

// enter waits until it is in, and reports whether ctx ended before.
func (g turn) enter(ctx context.Context) bool {
	select {
	case g <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (g turn) leave() { <-g }

// HandOver hands this kproxy over to the one at the other end of conn, which takes over from it, and takes conn over.
// Whatever fails until that has confirmed, this one goes on.
func (a *Agent) HandOver(conn *handover.Conn, with takeover.Belongings) {
	h := &predecessor{Agent: a, Successor: takeover.Successor{Conn: conn}, with: with}
	err := h.run()
	switch {
	case h.over:
		a.successor.Store(conn) // open until this process ends
		return
	case err != nil:
		a.log.Warn("another kproxy hasn't taken over; this one goes on", "error", err)
	}
	conn.Close()
}

// Relieved reports whether another kproxy has taken over.
func (a *Agent) Relieved() bool { return a.relieved.Load() }

// AwaitSuccessor waits until ctx is done, or the kproxy has ended that has taken over, or asked this one to end.
func (a *Agent) AwaitSuccessor(ctx context.Context) {
	conn := a.successor.Load()
	if conn == nil {
		return
	}
	defer context.AfterFunc(ctx, conn.Close)()
	conn.Ended()
}

// predecessor is a kproxy in the conversation with its successor.
type predecessor struct {
	*Agent
	takeover.Successor
	with takeover.Belongings
	over bool // it has been taken over
}

func (h *predecessor) run() error {
	var hello handover.Hello
	if _, err := h.Conn.Receive(takeover.AnswerBound, &hello); err != nil {
		return err
	}
	if !h.isSetUp.Load() || h.current.Load() == nil || !h.heart.served.Load() {
		return errors.New("this one hasn't begun to serve yet") // without an answer, so that it is asked again
	}
	if why := takeover.Unwilling(&hello); why != "" {
		return h.Refuse(&handover.Welcome{Refused: why}, why)
	}
	select {
	case h.handing <- struct{}{}:
		defer h.handing.leave()
	default:
		why := "another one is taking over at this moment, or this one is about to end"
		return h.Refuse(&handover.Welcome{Refused: why}, why)
	}
	tcp, udp := h.userspace.Ports()
	welcome := &handover.Welcome{Steering: h.madeFor(tcp, udp), TCPPort: uint32(tcp), UDPPort: uint32(udp)}
	rows, fds := h.userspace.Listeners()
	welcome.Listeners = rows
	for _, f := range append(slices.Clone(h.with.Files), takeover.File{Name: takeover.LockName, FD: int(h.lock.Fd())}) {
		fds = append(fds, f.FD)
		welcome.Files = append(welcome.Files, handover.File{Name: f.Name, File: uint32(len(fds))})
	}
	if err := h.Conn.Send(takeover.AnswerBound, welcome, fds...); err != nil {
		return err
	}
	h.log.Info("another kproxy prepares to take over")
	step, err := h.Asked(takeover.PrepareBound)
	if err != nil {
		return err
	}
	if step == handover.End {
		h.log.Info("another kproxy takes this one's place once this has ended")
		h.successor.Store(h.Conn)
		h.over = true
		h.end()
		return nil
	}
	return h.paused(step)
}

// paused keeps the loops from programming the kernel while the successor reads it, and goes on with the freeze.
func (h *predecessor) paused(step handover.Step) error {
	if step != handover.Pause {
		return fmt.Errorf("unexpected step %v", step)
	}
	ctx, cancel := context.WithTimeout(context.Background(), takeover.PauseBound)
	defer cancel()
	for _, g := range []turn{h.passing, h.programmer.passing} {
		if !g.enter(ctx) {
			return h.Refuse(&handover.Paused{Refused: "its rules are being written all the time"}, "the pass under way didn't end")
		}
		defer func() {
			if !h.over {
				g.leave()
			}
		}()
	}
	h.orders.Stop(true) // the successor has read those that there were, and hears of no other
	defer func() {
		if !h.over {
			h.orders.Stop(false)
		}
	}()
	listeners, fds := h.healths.Files()
	defer handover.CloseFiles(fds)
	if err := h.accounting.Refresh(0, h.conntrack.List); err != nil {
		h.log.Warn("the kernel's connections can't be counted", "error", err)
	}
	paused := &handover.Paused{
		Files: listeners, Health: takeover.HealthOut(h.prober.View()), Kernel: takeover.CountersOut(h.accounting.Figures()), History: h.with.History(),
	}
	if err := h.Conn.Send(takeover.PauseBound, paused, fds...); err != nil {
		return err
	}
	switch step, err := h.Asked(takeover.PauseBound); {
	case err != nil:
		return err
	case step != handover.Give:
		return fmt.Errorf("unexpected step %v", step)
	}
	return h.frozen()
}

// frozen gives away what userspace carries.
func (h *predecessor) frozen() error {
	defer pauseCollector()()
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), h.freezeBound())
	defer cancel()
	left := func() time.Duration { return h.freezeBound() - time.Since(began) }
	us, err := h.userspace.HandOver(ctx)
	if err != nil {
		return h.Refuse(&handover.Given{Refused: err.Error()}, err.Error())
	}
	err = h.Conn.Send(left(), &handover.Given{Userspace: *us.State}, us.Files...)
	var ask handover.Ask
	if err == nil {
		_, err = h.Conn.Receive(left(), &ask)
	}
	// From here on CONFIRM can't arrive any more, so that both know how it ended.
	if err != nil && h.Conn.Decided(&ask) {
		err = nil
	}
	if err == nil && ask.Step != handover.Confirm {
		err = fmt.Errorf("unexpected step %v", ask.Step)
	}
	if err != nil {
		us.Resume()
		return fmt.Errorf("connections were at rest for %s: %w", time.Since(began).Round(time.Millisecond), err)
	}
	h.over = true
	h.relieved.Store(true)
	h.with.Relieved()
	us.Release()
	h.log.Info("another kproxy has taken over", "descriptors", len(us.Files))
	h.end()
	return nil
}

// madeFor says what the rules are made for that lead to userspace's listeners at these ports. Where two kproxies
// differ in that, one can't take over from the other.
func (a *Agent) madeFor(tcp, udp uint16) string {
	planes := a.driver.Planes()
	s := node.SettingsOf(&a.cfg)
	return fmt.Sprintf("%s marks=%#x,%#x route-table=%d ports=%d,%d",
		planes[len(planes)-1], s.Marks.Masquerade, s.Marks.Transparent, s.RouteTable, tcp, udp)
}
