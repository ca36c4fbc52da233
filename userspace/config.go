package userspace

import (
	"log/slog"
	"net/netip"
	"reflect"
	"time"

	"kproxy.dev/kproxy/service"
)

// Config configures a Server. Fields that are zero have the defaults of filled.
type Config struct {
	Logger *slog.Logger

	// TCPPort and UDPPort are the ports of the shared listeners; 0 lets the
	// operating system choose.
	TCPPort, UDPPort uint16

	// Mark is set on every socket the Server opens towards an endpoint or
	// itself, so that the steering rules leave them alone: the transparent bit and the
	// one below, and never the masquerade bit.
	Mark uint32

	// Origin tells where a UDP client's datagrams were headed. Without it, no
	// UDP is served.
	Origin OriginLookup
	// TCPOrigin tells where an accepted connection, a socket of the family given, was
	// headed; by default the kernel does (SO_ORIGINAL_DST).
	TCPOrigin func(fd int, f service.Family) (netip.AddrPort, error)
	// Loops is how many loops serve TCP connections, and how many workers UDP; 0 means one for each processor
	// that this process may use.
	Loops int

	// MaxFDs bounds the file descriptors of the whole process; 0 means
	// RLIMIT_NOFILE, raised to its hard limit.
	MaxFDs int
	// MaxSessions bounds the UDP sessions; 0 means what MaxFDs leaves room for.
	MaxSessions int
	// MaxSocketMemory bounds what the sockets of TCP connections hold in the kernel, in bytes; 0
	// means half of what net.ipv4.tcp_mem calls pressure, or of the kernel's default for that.
	MaxSocketMemory int

	// Recorded, if it isn't nil, has the Server record what Salvage needs in another process should
	// this one crash, and gets the descriptor of the records once they count (Confirm).
	Recorded func(memory int)

	// ConnectTimeout bounds one attempt, ConnectTotal all attempts for one
	// client. Retries is how many further endpoints are tried where a service
	// doesn't say; -1 means none.
	ConnectTimeout time.Duration
	ConnectTotal   time.Duration
	Retries        int

	// HalfCloseTimeout is how long one side may stay silent after the other
	// has finished sending, before both are reset.
	HalfCloseTimeout time.Duration
	// UDPIdleTimeout ends a session that was silent in both directions.
	UDPIdleTimeout time.Duration
	// KeepAlive is how long a TCP connection is idle before the kernel asks
	// its ends whether they are still there.
	KeepAlive time.Duration

	// OnFirst is called once for each service, from some goroutine and without
	// locks held, when its first connection or session has reached an endpoint.
	OnFirst func(service.Key)
	// OnServing is called once after Run, from some goroutine, when each loop and worker has begun.
	OnServing func()
	// OnAnswered is called with each TCP connection that an endpoint takes and each session that it answers; OnFailed with
	// each attempt that an endpoint doesn't take, err being why. Both are called by the goroutine that serves it: they have
	// to return at once.
	OnAnswered func(service.Protocol, netip.AddrPort)
	OnFailed   func(p service.Protocol, endpoint netip.AddrPort, client netip.Addr, err error)
	// TimeExceeded tells a client whose datagram arrived with a TTL of 1 at an address of this node's that it isn't forwarded. It is
	// called by the goroutine that serves it, at most a thousand times a second.
	TimeExceeded func(client, at netip.AddrPort, datagram []byte) error
	// OnEnd is called with each connection and session that ends, or that no endpoint takes, by the
	// goroutine that serves it: it has to return at once, and may not call the Server.
	OnEnd func(End)
}

// filled returns c with the defaults in place of zero fields. HalfCloseTimeout is the kernel's own bound for
// a half-closed connection (nf_conntrack_tcp_timeout_fin_wait), so that moving
// a service between data planes changes nothing there.
func (c Config) filled() Config {
	defaults := Config{
		Logger:           slog.New(slog.DiscardHandler),
		Mark:             0x1800,
		TCPOrigin:        kernelOrigin,
		Loops:            processors,
		ConnectTimeout:   time.Second,
		ConnectTotal:     5 * time.Second,
		Retries:          3,
		HalfCloseTimeout: 2 * time.Minute,
		UDPIdleTimeout:   time.Minute,
		KeepAlive:        time.Minute,

		OnFirst:      func(service.Key) {},
		OnServing:    func() {},
		OnAnswered:   func(service.Protocol, netip.AddrPort) {},
		OnFailed:     func(service.Protocol, netip.AddrPort, netip.Addr, error) {},
		TimeExceeded: func(netip.AddrPort, netip.AddrPort, []byte) error { return nil },
		OnEnd:        func(End) {},
	}
	fields := reflect.ValueOf(&c).Elem()
	for f, v := range reflect.ValueOf(defaults).Fields() {
		if field := fields.FieldByIndex(f.Index); field.IsZero() {
			field.Set(v)
		}
	}
	return c
}
