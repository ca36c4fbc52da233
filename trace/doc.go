// Package trace answers where a connection to an address would go and what
// would stop it: it follows the packet through the hooks of the kernel as they
// are now, read back from it, and through kproxy's own listener where the
// service is carried in userspace.
//
// Nothing is changed by a trace, and nothing is sent unless a probe is asked
// for. What it reads can change while it is read, so that an answer is only as
// good as the moment. A match that it doesn't understand makes the verdict
// "undetermined", never a guess.
//
// Everything here may be used from several goroutines at once.
package trace
