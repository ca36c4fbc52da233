// Package lb chooses an endpoint for a new connection.
//
// [New] makes a [Picker] for a fixed list of targets; when the list changes, a
// new Picker is made. What has to outlive that (the connections an endpoint
// carries) is in a [Load] that the caller owns and hands to both. [Affinity]
// remembers which endpoint a client had. [Slots] and [Probabilities] turn
// weights into the static splits that kernel rules can express.
//
// Everything here is safe for concurrent use, picks in O(1) or O(log n), and
// allocates nothing while picking. No lock is shared between two Pickers.
package lb
