// Package traffic makes the traffic of the data plane's benchmark: clients that
// load an address in one of several ways ([Run]), and the server behind it
// ([Serve]). Each runs as a process of its own, in a network namespace.
//
// Client and server must cost less than what is between them, or they would be
// what is measured. Both are event loops over epoll on threads of their own
// ([Threads] each), with system calls that bypass Go's scheduler: nothing else
// runs in those processes, and their memory is there before the clock starts.
//
// Everything received is checked: messages byte by byte, streams at a mark in
// every [markEvery] bytes and by their length. What is wrong, missing or late
// is counted as failed.
package traffic
