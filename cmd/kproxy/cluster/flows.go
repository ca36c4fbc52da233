package cluster

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

// FlowRow says who talks to what, all their connections together: on a node, or on all. A client is named by the node whose address
// it has, or by a service that its address is an endpoint of, if there is one; else by its address.
type FlowRow struct {
	From        string `json:"from"` // "node NAME", NAMESPACE/NAME of a service it is an endpoint of, or an address
	To          string `json:"to"`   // NAMESPACE/NAME[:PORT]
	Connections int    `json:"connections"`
	Bytes       uint64 `json:"bytes"`
	Nodes       int    `json:"nodes"` // where the connections begin
}

const (
	flowsOfNode  = 32   // of each node, those with most connections
	pairsAtOnce  = 4096 // while they are counted
	flowsAtMost  = 200  // of an answer
	flowsAnswers = 40   // unless a request says
)

// flows lists the busiest flows of a node.
type flows struct {
	busiest  []FlowRow
	unlisted int    // connections that aren't among them
	failure  string // why there are none
}

// readFlows counts a node's live connections.
func (b *Board) readFlows(ctx context.Context, client *web.Client, p *patience) (out flows, err error) {
	pairs := map[[2]string]*FlowRow{}
	err = client.EachConnection(ctx, func(c *plan.ConnectionStatus) {
		p.hears()
		k := [2]string{b.nameOf(c), c.Service}
		f := pairs[k]
		if f == nil {
			if len(pairs) >= pairsAtOnce {
				out.unlisted++
				return
			}
			f = &FlowRow{From: k[0], To: k[1]}
			pairs[k] = f
		}
		f.Connections++
		f.Bytes += c.BytesIn + c.BytesOut
	})
	for i, f := range slices.SortedFunc(maps.Values(pairs), busier) {
		if i < flowsOfNode {
			out.busiest = append(out.busiest, *f)
		} else {
			out.unlisted += f.Connections
		}
	}
	return out, err
}

func busier(a, b *FlowRow) int {
	return cmp.Or(cmp.Compare(b.Connections, a.Connections), cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
}

// nameOf is a connection's client.
func (b *Board) nameOf(c *plan.ConnectionStatus) string {
	a := c.Client.Addr().Unmap()
	b.mu.Lock()
	defer b.mu.Unlock()
	return cmp.Or(b.owners[a], a.String())
}

// FlowList is the JSON of /api/v1/flows.
type FlowList struct {
	Flows    []FlowRow `json:"flows"`    // most connections first
	Pairs    int       `json:"pairs"`    // of all nodes' lists, shown or not
	Unlisted int       `json:"unlisted"` // connections that are too few of a kind on their node to be in its list
	Unknown  int       `json:"unknown"`  // nodes whose connections aren't known
}

func (b *Board) flowList(r *http.Request) (any, error) {
	limit, err := web.Parameter(r, "limit", flowsAnswers, 1, flowsAtMost)
	if err != nil {
		return nil, err
	}
	of := r.URL.Query().Get("service")
	sums := map[[2]string]*FlowRow{}
	list := &FlowList{Flows: []FlowRow{}}
	for _, m := range b.members {
		if m.trouble != nil || m.flows.failure != "" || m.flowsAt.IsZero() {
			list.Unknown++
			continue
		}
		list.Unlisted += m.flows.unlisted
		for i := range m.flows.busiest {
			f := &m.flows.busiest[i]
			if of != "" && f.To != of {
				continue
			}
			k := [2]string{f.From, f.To}
			if sums[k] == nil {
				sums[k] = &FlowRow{From: f.From, To: f.To}
			}
			sums[k].Connections += f.Connections
			sums[k].Bytes += f.Bytes
			sums[k].Nodes++
		}
	}
	list.Pairs = len(sums)
	for i, f := range slices.SortedFunc(maps.Values(sums), busier) {
		if i < limit {
			list.Flows = append(list.Flows, *f)
		}
	}
	return list, nil
}
