#!/usr/bin/env bash
# Rewrites the blocks of the pages about the data planes: those of userspace and
# iptables on this machine, those of IPVS in the VM where this machine has none.
# As root. Then read the difference.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
export CGO_ENABLED=0 KPROXY_BIN=$bin/kproxy
go build -buildvcs=false -o "$bin/kproxy" ./cmd/kproxy
go test -buildvcs=false -c -o "$bin/docs.test" ./test/docs
cd test/docs
"$bin/docs.test" -test.run 'Page$' -update
if [[ ! -e /proc/net/ip_vs ]]; then
	KPROXY_VM_WRITE=$(cd ../../docs && pwd) ../vm/run.sh "$bin/docs.test" -test.run '^TestIPVSPage$' -update
fi
git diff --stat -- ../../docs
