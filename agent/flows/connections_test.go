package flows

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

func recentKey(i int) service.Key {
	return service.Key{Namespace: "default", Name: fmt.Sprintf("s%d", i), Protocol: service.TCP}
}

func ended(at int, client, endpoint string, refused string) plan.Ended {
	e := plan.Ended{Time: time.Unix(int64(at), 0), Client: netip.AddrPortFrom(netip.MustParseAddr(client), 4711), Refused: refused}
	if endpoint != "" {
		e.Endpoint = netip.MustParseAddrPort(endpoint)
	}
	return e
}

// TestRecentsAreBounded: however much ends, only so much is remembered, and what is dropped is counted.
func TestRecentsAreBounded(t *testing.T) {
	var r Recents
	k := recentKey(0)
	for i := range 500 {
		r.add(k, ended(i, "10.1.0.1", "10.2.0.2:80", "")) // comes all the time
		r.add(k, ended(i, fmt.Sprintf("10.1.1.%d", i%250), "10.2.0.2:80", ""))
		r.add(k, ended(i, "10.1.0.1", "10.2.0.3:80", "refused"))
	}
	got := r.remembered(k)
	if len(got.Ended) != recentEnds || len(got.Refused) != recentEnds || len(got.Talks) != recentTalks {
		t.Errorf("%d ended, %d refused, %d pairs", len(got.Ended), len(got.Refused), len(got.Talks))
	}
	sum := got.Others
	for _, talk := range got.Talks {
		sum += talk.Connections + talk.Refused
	}
	if sum != 1500 {
		t.Errorf("%d connections in all, want 1500", sum)
	}
	if i := slices.IndexFunc(got.Talks, func(t plan.Talk) bool { return t.Client == netip.MustParseAddr("10.1.0.1") && t.Connections == 500 }); i < 0 {
		t.Error("the pair with the most connections made room")
	}
	for i := range 2 * recentServices {
		r.add(recentKey(i), ended(1000+i, "10.1.0.1", "10.2.0.2:80", ""))
	}
	if n := len(r.services); n != recentServices {
		t.Errorf("%d service ports are remembered, want %d", n, recentServices)
	}
	all := r.Refused()
	if len(all) != recentShown || !all[0].Time.Equal(time.Unix(499, 0)) {
		t.Errorf("%d refused, the newest at %v", len(all), all[0].Time)
	}
	r.Follow(plan.Delta{Changes: []plan.Change{{Was: &plan.Service{Port: &service.Port{Key: recentKey(2*recentServices - 1)}}}}})
	if n := len(r.remembered(recentKey(2*recentServices-1)).Ended) + len(r.services); n != recentServices-1 {
		t.Errorf("a service port that is gone is remembered")
	}
}

// TestAPairThatIsSilentMakesRoom: clients that left long ago don't keep those of now out.
func TestAPairThatIsSilentMakesRoom(t *testing.T) {
	var r Recents
	k := recentKey(0)
	for i := range recentTalks {
		for range 3 {
			r.add(k, ended(i, fmt.Sprintf("10.1.1.%d", i), "10.2.0.2:80", ""))
		}
	}
	later := 100 + int(talkIdle.Seconds())
	for range 2 {
		r.add(k, ended(later, "10.1.2.1", "10.2.0.2:80", ""))
		r.add(k, ended(later, "10.1.2.2", "10.2.0.2:80", ""))
	}
	for _, want := range []string{"10.1.2.1", "10.1.2.2"} {
		if !slices.ContainsFunc(r.remembered(k).Talks, func(t plan.Talk) bool { return t.Client.String() == want && t.Connections == 2 }) {
			t.Errorf("%s isn't remembered", want)
		}
	}
}

// TestEndsOfFlows: what the kernel tells of a flow that has ended, in words.
func TestEndsOfFlows(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	s := &plan.Service{Port: &service.Port{Key: recentKey(1)}, Kernel: plan.NFTables}
	at := netip.MustParseAddrPort
	flow := func(state uint8, left time.Duration, out, back uint64) *conntrack.Flow {
		return &conntrack.Flow{
			Protocol: service.TCP, OrigSrc: at("10.1.0.2:4711"), OrigDst: at("10.96.0.1:80"), ReplySrc: at("10.2.0.2:80"), ReplyDst: at("10.1.0.2:4711"),
			TCPState: state, Timeout: left, OrigPackets: out, ReplyPackets: back,
		}
	}
	const synSent, timeWait, closed = 1, 7, 8
	for _, tt := range []struct {
		name string
		flow *conntrack.Flow
		want string
	}{
		{"closed a moment ago", flow(timeWait, 118*time.Second, 6, 5), "2s false "},
		{"closed, and forgotten", flow(timeWait, 0, 6, 5), "2m0s false "},
		{"reset", flow(closed, 7*time.Second, 6, 5), "3s true "},
		{"refused", flow(synSent, 0, 1, 1), "0s false the endpoint refused it"},
		{"no answer", flow(synSent, 110*time.Second, 3, 0), "10s false the endpoint didn't answer"},
	} {
		e := endOf(s, tt.flow, now)
		if got := fmt.Sprint(now.Sub(e.Time), " ", e.Reset, " ", e.Refused); got != tt.want || e.DataPlane != plan.NFTables {
			t.Errorf("%s: %q, want %q (%+v)", tt.name, got, tt.want, e)
		}
	}
}

// TestWhatIsShownIsBoundedWhileItIsGathered: of a service with very many flows, too.
func TestWhatIsShownIsBoundedWhileItIsGathered(t *testing.T) {
	var ends []plan.Ended
	var talks talkSum
	const flows = 10 * recentPairs
	for i := range flows {
		e := ended(i, netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}).String(), "10.2.0.2:80", "")
		ends = keepNewest(ends, e)
		talks.add(talkOf(e))
		if cap(ends) > 16*recentShown || len(talks.pairs) > recentPairs {
			t.Fatalf("room for %d ends, %d pairs after %d flows", cap(ends), len(talks.pairs), i+1)
		}
	}
	shown := newestFirst(ends)
	if len(shown) != recentShown || !shown[0].Time.Equal(ended(flows-1, "10.0.0.1", "10.2.0.2:80", "").Time) || !shown[recentShown-1].Time.Equal(ended(flows-recentShown, "10.0.0.1", "10.2.0.2:80", "").Time) {
		t.Errorf("%d ends are shown, from %v to %v", len(shown), shown[0].Time, shown[len(shown)-1].Time)
	}
	list, others := talks.most(recentTalks)
	if len(list) != recentTalks || others != flows-recentTalks {
		t.Errorf("%d pairs, %d connections of others", len(list), others)
	}
}

// BenchmarkRecents measures what the end of each connection costs.
func BenchmarkRecents(b *testing.B) {
	var r Recents
	var ends []userspace.End
	for i := range 64 {
		ends = append(ends, userspace.End{Connection: userspace.Connection{
			Protocol: service.TCP, Service: recentKey(i % 8), Started: time.Now(),
			Client: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), 4711), Endpoint: netip.MustParseAddrPort("10.2.0.2:80"),
		}})
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		r.UserspaceEnded(ends[i%64])
	}
}
