#!/usr/bin/env bash
# What `make bench` does: builds and runs the benchmark (run/), and writes its report to
# bin/bench. As root, with bin/kproxy built.
#
# Usage: test/bench/bench.sh [quick] [ARGUMENTS of run]
#   quick   each work once and short: fails when one of them does, or is late in four tries
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin
export KPROXY_BIN=${KPROXY_BIN:-$PWD/bin/kproxy}
export GOFLAGS="${GOFLAGS:-} -buildvcs=false"
quick=()
if [[ ${1:-} == quick ]]; then
	quick=(-quick)
	shift
fi
mkdir -p bin/bench
go build -o bin/bench/ ./test/bench/run
bin/bench/run "${quick[@]}" -out bin/bench "$@" >/dev/null
echo "bin/bench/bench.md, bench.html and bench.json hold the report"
