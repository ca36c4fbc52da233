// Package steering decides who gets a service's new connections, by rules of iptables and
// ipsets: redirect sets say which services userspace serves, and a DNAT to the shared
// listeners' address leads their connections there while a kproxy is alive. What isn't
// redirected goes on to the kernel data planes ([Stack]), whose own rules have a place in these (see
// [PlaneRules]).
//
// The memberships of redirect sets follow every plan at once ([SetChanges]); rules
// ([Render]) are the same whatever services there are. Rendering is pure. [Routing] and the
// functions that change sets work in the network namespace of the calling thread, and are
// safe for concurrent use.
package steering
