// Package compare measures what each data plane costs: it runs the same bounded
// loads through every data plane that this host has, and without any proxy as
// the limit, and reports them side by side. `kproxy lab compare` is it.
//
// Every data plane has a network of its own (package lab): a client, a node and
// backends that are alike, and on the node a kproxy that holds every service in
// that one data plane. So nothing is moved or programmed between two runs, and
// the runs are interleaved: each load goes through every data plane in turn
// before it is repeated. On a machine with other things to do, only figures that
// were measured side by side can be compared; that is why each one is also given
// as a ratio to the direct one of the same round.
//
// After every run the kernel's connection table is asked what carried it
// ([checkCarried]); a run that went another way than it should is an error, not
// a figure.
//
// Load and server are processes of their own (package load). Nothing is left
// behind, whether [Run] succeeds, fails or is cancelled; [Down] removes what a
// killed one left.
package compare
