package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nlmsg"
)

// Request is what a [Table] is asked to do.
type Request struct {
	Do      Verb
	Virtual kernel.Virtual
	// Real is the real server of Virtual that it is about. Without an address, it is
	// about Virtual itself. Virtual.Reals don't matter: a new virtual server has none,
	// an edited one keeps them, and they go with a deleted one.
	Real kernel.Real
}

// Verb is what is done to a virtual or real server.
type Verb int

// The verbs, as the commands of the kernel's netlink family: add doesn't touch
// what exists and edit makes nothing.
const (
	Add    Verb = iota // fails with [ErrExists]
	Edit               // fails with [kernel.ErrNotFound]
	Delete             // fails with [kernel.ErrNotFound]
)

func (v Verb) String() string { return [...]string{"add", "edit", "delete"}[v] }

// one carries out a single request.
func one(t Table, r Request) error { return t.Change(r)[0] }

func (r *Request) ofReal() bool { return r.Real.Address.IsValid() }

// Change implements [Table].
func (t *Netlink) Change(requests ...Request) []error {
	t.mu.Lock()
	defer t.mu.Unlock()
	errs := t.changes.Change(len(requests), func(b []byte, i int) []byte { return requests[i].append(b, t.family) })
	for i, err := range errs {
		if err != nil {
			errs[i] = requests[i].explain(err)
		}
	}
	return errs
}

// explain says what the kernel's error is about, and what it means.
func (r *Request) explain(err error) error {
	v := r.Virtual
	if r.ofReal() {
		return fmt.Errorf("%s real server %s of %s %s: %w", r.Do, r.Real.Address, v.Protocol, v.Address, classify(err))
	}
	if errors.Is(err, unix.ENOENT) && r.Do != Delete {
		// A virtual server that isn't there is ESRCH (ip_vs_genl_set_cmd).
		err = fmt.Errorf("%w: %s", ErrScheduler, v.Scheduler)
	}
	return fmt.Errorf("%s virtual server %s %s: %w", r.Do, v.Protocol, v.Address, classify(err))
}

// Generic netlink's commands and attributes of virtual and real servers
// (include/uapi/linux/ip_vs.h).
const (
	cmdNewService = 1 // the next ones edit and delete
	cmdNewDest    = 5 // as these

	attrService = 1 // of a command
	attrDest    = 2

	serviceFamily    = 1
	serviceProtocol  = 2
	serviceAddress   = 3
	servicePort      = 4
	serviceScheduler = 6
	serviceFlags     = 7
	serviceTimeout   = 8
	serviceNetmask   = 9

	destAddress        = 1
	destPort           = 2
	destForwarding     = 3
	destWeight         = 4
	destUpperThreshold = 5
	destLowerThreshold = 6
)

// append encodes the request, to the netlink family of IPVS.
func (r *Request) append(b []byte, family uint16) []byte {
	command := cmdNewService + byte(r.Do)
	if r.ofReal() {
		command = cmdNewDest + byte(r.Do)
	}
	b = append(nlmsg.AppendRequest(b, family, 0), command, 1, 0, 0) // version 1
	b = nlmsg.AppendNested(b, attrService, r.appendVirtual)
	if r.ofReal() {
		b = nlmsg.AppendNested(b, attrDest, r.appendReal)
	}
	return b
}

// appendVirtual appends what names the virtual server, and if it is about that, its settings.
func (r *Request) appendVirtual(b []byte) []byte {
	s := serviceOf(r.Virtual)
	b = nlmsg.Append(b, serviceFamily, binary.NativeEndian.AppendUint16(nil, s.AddressFamily)...)
	b = nlmsg.Append(b, serviceProtocol, binary.NativeEndian.AppendUint16(nil, s.Protocol)...)
	b = nlmsg.Append(b, serviceAddress, s.Address...)
	b = nlmsg.Append(b, servicePort, binary.BigEndian.AppendUint16(nil, s.Port)...)
	if r.ofReal() || r.Do == Delete {
		return b
	}
	b = nlmsg.Append(b, serviceScheduler, append([]byte(s.SchedName), 0)...)
	b = nlmsg.Append(b, serviceFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, s.Flags), ^uint32(0))...)
	b = nlmsg.AppendNative(b, serviceTimeout, s.Timeout)
	return nlmsg.AppendNative(b, serviceNetmask, s.Netmask)
}

// appendReal appends the real server, to which connections are masqueraded (forwarding 0).
func (r *Request) appendReal(b []byte) []byte {
	b = nlmsg.Append(b, destAddress, r.Real.Address.Addr().AsSlice()...)
	b = nlmsg.Append(b, destPort, binary.BigEndian.AppendUint16(nil, r.Real.Address.Port())...)
	b = nlmsg.AppendNative(b, destForwarding, 0)
	b = nlmsg.AppendNative(b, destWeight, r.Real.Weight)
	b = nlmsg.AppendNative(b, destUpperThreshold, 0)
	return nlmsg.AppendNative(b, destLowerThreshold, 0)
}
