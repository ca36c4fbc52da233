package handover

// Message is a pointer to one of the structs below. It goes as a CBOR map (RFC 8949) from a field's number to its value, without
// fields that have the zero value. Two releases may be at the two ends, so a field's number and meaning never change, and what a
// field that is missing means is what it meant before there was the field. Fields that a release doesn't know are ignored: what goes on
// without them may be added; what doesn't is a new [Version], which the two agree about before.
//
// Descriptors travel beside a message. It numbers them from 1, in their order; 0 is none. Durations are
// nanoseconds: the monotonic clocks of two processes have nothing in common. Addresses are [Packed].
// Protocols are numbered as in the IP header.
type Message any

// Version is of the way that a kproxy takes over from another: of what can't be done without.
const Version = 2

// How a kproxy takes over from the one that runs, step by step. The successor asks, over the control
// socket, and the predecessor answers; until it has been asked to Confirm, either may fail or
// end and the predecessor goes on as if nothing had happened.
//
//	Hello       → Welcome           the successor prepares all that can fail; the predecessor works as ever
//	Ask Pause   → Paused            the predecessor programs the kernel no longer, and forwards as ever
//	Ask Give    → Given             it forwards nothing any more
//	Ask Confirm                     the successor forwards; the predecessor ends
type (
	// Hello begins.
	Hello struct {
		Version uint32 `cbor:"1,keyasint,omitempty"`
		Network uint64 `cbor:"2,keyasint,omitempty"` // the network namespace: its inode number
	}

	// Welcome has all that the successor needs to prepare.
	Welcome struct {
		Refused string `cbor:"1,keyasint,omitempty"` // why the successor can't take over, a sentence; then there is nothing else
		// What the rules are made for that lead to userspace: with anything else the successor asks to End.
		Steering  string     `cbor:"2,keyasint,omitempty"`
		Listeners []Listener `cbor:"3,keyasint,omitempty"` // of userspace
		Files     []File     `cbor:"4,keyasint,omitempty"`
		TCPPort   uint32     `cbor:"5,keyasint,omitempty"` // where these listen
		UDPPort   uint32     `cbor:"6,keyasint,omitempty"`
	}

	// Ask has the predecessor take a Step.
	Ask struct {
		Step Step `cbor:"1,keyasint,omitempty"`
	}

	// Paused has what the predecessor knows of endpoints.
	Paused struct {
		Refused string    `cbor:"1,keyasint,omitempty"`
		Files   []File    `cbor:"2,keyasint,omitempty"`
		Health  []Health  `cbor:"3,keyasint,omitempty"`
		Kernel  []Service `cbor:"4,keyasint,omitempty"` // what the kernel's data planes have counted
		History []byte    `cbor:"5,keyasint,omitempty"` // of the dashboard, in a form of its own; another release may not know it
	}

	// Given has what userspace carries.
	Given struct {
		Refused   string    `cbor:"1,keyasint,omitempty"`
		Userspace Userspace `cbor:"2,keyasint,omitempty"`
	}
)

// Step says what the successor asks for.
type Step uint8

// The steps. End is to drain and end as at SIGTERM: the successor waits for that.
const (
	Pause Step = iota + 1
	Give
	Confirm
	End
)

// File is a descriptor that is known by name: "lock NAME", "listener FLAG ADDRESS".
type File struct {
	Name string `cbor:"1,keyasint,omitempty"`
	File uint32 `cbor:"2,keyasint,omitempty"`
}

// Health holds what is known of an endpoint by its health checks.
type Health struct {
	Protocol  uint32  `cbor:"1,keyasint,omitempty"`
	Address   []byte  `cbor:"2,keyasint,omitempty"`
	Kind      string  `cbor:"3,keyasint,omitempty"` // of check, with its path and port
	Path      string  `cbor:"4,keyasint,omitempty"`
	Port      uint32  `cbor:"5,keyasint,omitempty"`
	Status    uint32  `cbor:"6,keyasint,omitempty"` // unknown, up, down
	Since     int64   `cbor:"7,keyasint,omitempty"` // wall time, in nanoseconds since 1970
	LastError string  `cbor:"8,keyasint,omitempty"`
	Flaps     []int64 `cbor:"9,keyasint,omitempty"` // wall times of the last changes between up and down, oldest first
}

// Listener is one family's shared port.
type Listener struct {
	Protocol uint32   `cbor:"1,keyasint,omitempty"`
	Family   uint32   `cbor:"2,keyasint,omitempty"` // 4 or 6
	Files    []uint32 `cbor:"3,keyasint,omitempty"` // one of TCP; of UDP one for each worker, in their order
}

// Userspace is all that the forwarder has but for its listeners.
type Userspace struct {
	Services        []Service     `cbor:"1,keyasint,omitempty"` // with anything to tell
	Connections     []*Connection `cbor:"2,keyasint,omitempty"`
	Sessions        []*Session    `cbor:"3,keyasint,omitempty"`
	ShedConnections []uint64      `cbor:"4,keyasint,omitempty"` // how many had to make room for others, by plan.ShedReasons
	ShedSessions    []uint64      `cbor:"5,keyasint,omitempty"`
	Before          []Flow        `cbor:"6,keyasint,omitempty"` // of clients of UDP before a restart, which have sent nothing since; Silent is since then
}

// Service holds what is known of a service port.
type Service struct {
	Namespace string     `cbor:"1,keyasint,omitempty"`
	Name      string     `cbor:"2,keyasint,omitempty"`
	Port      string     `cbor:"3,keyasint,omitempty"`
	Protocol  uint32     `cbor:"4,keyasint,omitempty"`
	Counters  Counters   `cbor:"5,keyasint,omitzero"`
	Endpoints []Endpoint `cbor:"6,keyasint,omitempty"`
	Affinity  []Affine   `cbor:"7,keyasint,omitempty"` // those that were silent longest come first
}

// Counters holds the counters of a service, or of one of its endpoints, since it exists.
type Counters struct {
	Total    uint64 `cbor:"1,keyasint,omitempty"` // connections or sessions
	Failed   uint64 `cbor:"2,keyasint,omitempty"` // of a service: clients that no endpoint took; of an endpoint: attempts
	Retried  uint64 `cbor:"3,keyasint,omitempty"`
	BytesIn  uint64 `cbor:"4,keyasint,omitempty"` // from clients to endpoints
	BytesOut uint64 `cbor:"5,keyasint,omitempty"`
}

// Endpoint is one of a Service.
type Endpoint struct {
	Address  []byte   `cbor:"1,keyasint,omitempty"` // and port
	Counters Counters `cbor:"2,keyasint,omitzero"`
}

// Affine is a client that keeps its endpoint.
type Affine struct {
	Client    []byte `cbor:"1,keyasint,omitempty"`
	Endpoint  []byte `cbor:"2,keyasint,omitempty"` // and port
	Remaining int64  `cbor:"3,keyasint,omitempty"` // until it expires, if the client stays silent
}

// Flow holds what connections and sessions have in common.
type Flow struct {
	Service   uint32 `cbor:"1,keyasint,omitempty"` // index in Userspace.Services
	Client    []byte `cbor:"2,keyasint,omitempty"` // and port
	Original  []byte `cbor:"3,keyasint,omitempty"` // where it connected to, and port
	Interface string `cbor:"4,keyasint,omitempty"` // that the client's packets come in on; empty where nothing goes by it
	Started   int64  `cbor:"5,keyasint,omitempty"` // nanoseconds since 1970
	Endpoint  []byte `cbor:"6,keyasint,omitempty"` // and port
	BytesIn   uint64 `cbor:"7,keyasint,omitempty"` // from client to endpoint
	BytesOut  uint64 `cbor:"8,keyasint,omitempty"`
	Silent    int64  `cbor:"9,keyasint,omitempty"` // for how long nothing has moved
}

// Connection is a TCP connection through a service.
type Connection struct {
	Flow     Flow  `cbor:"1,keyasint,omitzero"`
	Phase    Phase `cbor:"2,keyasint,omitempty"`
	Client   Side  `cbor:"3,keyasint,omitzero"`
	Endpoint Side  `cbor:"4,keyasint,omitzero"`
	Reached  bool  `cbor:"5,keyasint,omitempty"` // an endpoint has taken it at least once
	// Another endpoint may be tried, but for those that were.
	Searching    bool     `cbor:"6,keyasint,omitempty"`
	Tried        [][]byte `cbor:"7,keyasint,omitempty"`
	Attempts     uint32   `cbor:"8,keyasint,omitempty"`
	SearchLeft   int64    `cbor:"9,keyasint,omitempty"`  // until no other one is tried
	AttemptLeft  int64    `cbor:"10,keyasint,omitempty"` // while dialing: until this one is given up
	SilenceLimit int64    `cbor:"11,keyasint,omitempty"` // while relaying; 0 for none
	ResetLeft    int64    `cbor:"12,keyasint,omitempty"` // while leaving: until the reset waits no longer
}

// Phase says where a connection stands.
type Phase uint8

// The phases. In Leaving one side is closed, and the other gets a reset when what was sent to it has arrived.
const (
	Dialing Phase = iota
	Relaying
	Leaving
)

// Side is one of a connection's sockets, and the way from there to the other one.
type Side struct {
	File  uint32 `cbor:"1,keyasint,omitempty"`
	Over  bool   `cbor:"2,keyasint,omitempty"` // nothing will be read any more
	Ended bool   `cbor:"3,keyasint,omitempty"` // it has finished sending, and the other side was told so
	Dead  bool   `cbor:"4,keyasint,omitempty"` // writing to it has failed
	// What was read, and the other side hasn't taken: 16 KiB at most, or what is in a pipe.
	Copied  []byte `cbor:"5,keyasint,omitempty"`
	Piped   uint32 `cbor:"6,keyasint,omitempty"` // bytes
	PipeOut uint32 `cbor:"7,keyasint,omitempty"`
	PipeIn  uint32 `cbor:"8,keyasint,omitempty"`
}

// Session is a UDP client's.
type Session struct {
	Flow        Flow   `cbor:"1,keyasint,omitzero"`
	Worker      uint32 `cbor:"2,keyasint,omitempty"`  // whose sockets get its datagrams
	From        []byte `cbor:"3,keyasint,omitempty"`  // where they come from as the listener sees it, and port
	Zone        uint32 `cbor:"4,keyasint,omitempty"`  // of From, if that is a link-local address: an interface's index
	To          []byte `cbor:"5,keyasint,omitempty"`  // the address that they arrive at
	Interface   uint32 `cbor:"6,keyasint,omitempty"`  // that the first one came in on: its index
	File        uint32 `cbor:"7,keyasint,omitempty"`  // of the socket towards the endpoint
	Source      []byte `cbor:"8,keyasint,omitempty"`  // that socket's address; empty where the kernel chose it
	Transparent bool   `cbor:"9,keyasint,omitempty"`  // it isn't one of the node's own
	Asked       uint32 `cbor:"10,keyasint,omitempty"` // datagrams from the client, and from the endpoint, as far as they matter: up to 2
	Answers     uint32 `cbor:"11,keyasint,omitempty"`
	Pending     bool   `cbor:"12,keyasint,omitempty"` // no answer since the last one
	Greeted     bool   `cbor:"13,keyasint,omitempty"` // this endpoint has answered
	Copied      []byte `cbor:"14,keyasint,omitempty"` // the last one, to be sent again if the endpoint is gone; empty if it was too large
	Resends     uint32 `cbor:"15,keyasint,omitempty"` // of that
	Errors      uint32 `cbor:"16,keyasint,omitempty"` // in a row that say nothing about the endpoint
}
