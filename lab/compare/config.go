package compare

import (
	"errors"
	"fmt"
	"regexp"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare/load"
)

// Plane is a way for packets from client to backend.
type Plane string

// The planes, in the order of the generations. Direct is none of kproxy's: the
// node only routes.
const (
	Direct    Plane = "direct"
	Userspace Plane = "userspace"
	IPTables  Plane = "iptables"
	IPVS      Plane = "ipvs"
)

// Planes are all of them.
var Planes = []Plane{Direct, Userspace, IPTables, IPVS}

// Config says what to compare. Start from [DefaultConfig].
type Config struct {
	Prefix   string // of the namespaces' names, as in lab.Config
	Program  string // kproxy itself: it is the proxy, the load and the server
	Version  string // of the program
	Command  string // that was typed, for the report
	Repeat   int    // rounds
	Services []int  // how many services there are when first packets are measured; ascending
	Sizes    Sizes
	Slow     int          // this machine is so many times slower than usual
	Progress func(string) // hears what is done, a line each; may be nil
}

// Sizes bound one run of each load.
type Sizes struct {
	Time        time.Duration `json:"timeNanoseconds"`  // of throughput, new connections and sessions, and first packets
	Short       time.Duration `json:"shortNanoseconds"` // of the others
	Connections int           `json:"connections"`
	Exchanges   int           `json:"exchanges"`
	Sessions    int           `json:"sessions"`
	Firsts      int           `json:"firsts"`
}

// DefaultConfig takes two to four minutes.
func DefaultConfig() Config {
	return Config{
		Prefix: lab.DefaultPrefix, Repeat: 5, Services: []int{10, 1000, 10000}, Slow: 1,
		Sizes: Sizes{Time: 1500 * time.Millisecond, Short: time.Second, Connections: 25000, Exchanges: 40000, Sessions: 4500, Firsts: 1000},
	}
}

// QuickConfig takes well under a minute, and says less.
func QuickConfig() Config {
	c := DefaultConfig()
	c.Repeat, c.Services = 3, []int{10, 1000}
	c.Sizes = Sizes{Time: 400 * time.Millisecond, Short: 250 * time.Millisecond, Connections: 8000, Exchanges: 10000, Sessions: 1500, Firsts: 300}
	return c
}

// Bounds of a comparison.
const (
	MaxRepeat   = 10
	MaxServices = 20000
	// firstSessionPort is where the ports of UDP sessions begin; what the kernel
	// chooses begins at 32768.
	firstSessionPort = 10000
)

var prefixPattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?$`)

// Validate reports every problem of the configuration.
func (c Config) Validate() error {
	var errs []error
	if !prefixPattern.MatchString(c.Prefix) {
		errs = append(errs, fmt.Errorf("prefix %q is not of at most 30 lower-case letters, digits and inner dashes", c.Prefix))
	}
	if c.Repeat < 1 || c.Repeat > MaxRepeat {
		errs = append(errs, fmt.Errorf("repeat: %d is not between 1 and %d", c.Repeat, MaxRepeat))
	}
	if len(c.Services) == 0 {
		errs = append(errs, errors.New("services: at least one number is needed"))
	}
	for i, n := range c.Services {
		if n < 1 || n > MaxServices {
			errs = append(errs, fmt.Errorf("services: %d is not between 1 and %d", n, MaxServices))
		}
		if i > 0 && n <= c.Services[i-1] {
			errs = append(errs, fmt.Errorf("services: %d comes after %d; give each number once, the smallest first", n, c.Services[i-1]))
		}
	}
	return errors.Join(errs...)
}

// sessions are the UDP sessions of one run: in all rounds together there must
// be a port for each.
func (c Config) sessions() int {
	return min(c.Sizes.Sessions, (32768-firstSessionPort)/c.Repeat)
}

// workload is one of the loads that every plane carries in every round.
type workload struct {
	load  load.Load
	title string
}

// workloads are those that don't depend on the number of services.
func (c Config) workloads() []workload {
	s := c.Sizes
	return []workload{
		{load.Load{Kind: load.Throughput, Workers: 4, Count: 4, Time: s.Time}, "throughput of 4 TCP streams"},
		{load.Load{Kind: load.Connections, Workers: 16, Count: s.Connections, Time: s.Time}, "new TCP connections, 16 at a time"},
		{load.Load{Kind: load.Requests, Workers: 1, Count: s.Exchanges, Time: s.Short}, "requests on one TCP connection"},
		{load.Load{Kind: load.Datagrams, Workers: 1, Count: s.Exchanges, Time: s.Short}, "requests in one UDP session"},
		{load.Load{Kind: load.Sessions, Workers: 8, Count: c.sessions(), Time: s.Time}, "new UDP sessions, 8 at a time"},
	}
}

func (c Config) firsts() load.Load {
	return load.Load{Kind: load.Firsts, Workers: 1, Count: c.Sizes.Firsts, Time: c.Sizes.Time}
}

// within stretches how long something may take.
func (c Config) within(d time.Duration) time.Duration { return d * time.Duration(max(c.Slow, 1)) }

func (c Config) say(format string, args ...any) {
	if c.Progress != nil {
		c.Progress(fmt.Sprintf(format, args...))
	}
}
