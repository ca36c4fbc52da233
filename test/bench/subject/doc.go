// Package subject sets up what the data plane's benchmark compares: kproxy and
// its peers, each in a network of its own (package lab) with a client, a node and
// one backend, configured as well as it goes and alike in all else. Nothing of one
// subject is in another's way: an idle proxy uses no processor, and a namespace
// without rules tracks no connections.
//
// Proxies that clients address directly serve the node's address. Those behind a
// rule, kproxy as it is deployed among them, serve [ServiceAddress], which a rule
// redirects to them. kproxy keeps the client's address on the way to the backend
// unless its service is masqueraded; the others connect from the node's own.
//
// A [Rig] is one subject, set up; it is not safe for concurrent use.
package subject
