package web

import (
	"context"
	"net/netip"
)

func equalAddrPort(a, b netip.AddrPort) bool { return a == b }

func contextWith(ctx context.Context, key, value any) context.Context {
	return context.WithValue(ctx, key, value)
}
