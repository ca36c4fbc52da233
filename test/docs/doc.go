// Package docs keeps the pages that explain the data planes true: what they
// show was printed by a real kproxy in the lab's network, and a test compares
// it with what is printed now.
//
// A page shows output in blocks:
//
//	<!-- run: COMMAND -->
//	```text
//	$ COMMAND
//	…
//	```
//
// The command is run by bash on the lab's node, where `kproxy` is the program
// under test with the control socket of the one that runs there. Rules, routes
// and the like are compared as they are; counters, ports, times and the order
// of what has none are not.
//
// test/docs/update.sh rewrites the blocks of every page.
package docs
