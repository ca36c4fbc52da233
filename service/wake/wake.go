// Package wake wakes loops that wait at a channel.
package wake

// Up makes sure that a signal waits in c, which has one slot: any number of them wake a loop once.
func Up(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
