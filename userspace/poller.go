package userspace

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// bellNumber is what the kernel names a poller's bell by.
const bellNumber = -1

// eventsAtOnce is how many events one wait returns at most.
const eventsAtOnce = 64

// poller is what a goroutine waits with that serves many sockets: for their events
// (epoll(7)), and for what others ask it to do. Only post may be called by others.
type poller struct {
	epoll int
	bell  int // eventfd: somebody posted

	mu     sync.Mutex // guards what follows
	posted []func()
	rung   bool
	open   bool // takes what is posted
}

// init opens it. Nothing can be posted yet.
func (p *poller) init() error {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make epoll: %w", err)
	}
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(epoll)
		return fmt.Errorf("make eventfd: %w", err)
	}
	p.epoll, p.bell = epoll, bell
	if err := p.watch(bell, unix.EPOLLIN|unix.EPOLLET, bellNumber, 0); err != nil {
		p.shut()
		return err
	}
	return nil
}

// shut closes it.
func (p *poller) shut() {
	unix.Close(p.bell)
	unix.Close(p.epoll)
}

// watch asks for events of a socket, which will bear a number, and a tag that tells
// it from those that had the number before.
func (p *poller) watch(fd int, events uint32, number int32, tag uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: number, Pad: int32(tag)}
	if err := sysControl(p.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != 0 {
		return fmt.Errorf("watch socket: %w", err)
	}
	return nil
}

// admitPosts lets others post from now on.
func (p *poller) admitPosts() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = true
}

// post has f called soon, by the goroutine that waits; false if that doesn't take
// anything, or any more.
func (p *poller) post(f func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.open {
		return false
	}
	p.posted = append(p.posted, f)
	if !p.rung {
		p.rung = true
		unix.Write(p.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	return true
}

// answer does what was posted.
func (p *poller) answer() {
	p.mu.Lock()
	posted := p.posted
	p.posted = nil
	if p.rung {
		p.rung = false
		var b [8]byte
		unix.Read(p.bell, b[:])
	}
	p.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

// refusePosts takes no more posts and does the last ones.
func (p *poller) refusePosts() {
	p.mu.Lock()
	p.open = false
	p.mu.Unlock()
	p.answer()
}
