#!/usr/bin/env bash
# What `make bench` does: measures the data plane (run/) and programming the kernel
# (programming/), and makes one report of both, in bin/bench. As root, with
# bin/kproxy built.
#
# Usage: test/bench/bench.sh [quick]
#   quick   each work once and short: fails when one of them does, or is late in four tries
#
# BENCH_PARTS="dataplane programming" says which; BENCH_REPORT has further
# arguments for the report, such as -write-baseline.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin
export KPROXY_BIN=${KPROXY_BIN:-$PWD/bin/kproxy}
export GOFLAGS="${GOFLAGS:-} -buildvcs=false"
out=bin/bench
command="make bench"
quick=()
if [[ ${1:-} == quick ]]; then
	quick=(-quick)
	command+=" QUICK=1"
fi

mkdir -p "$out"
go build -o "$out/" ./test/bench/run ./test/bench/programming ./test/bench/report
parts=()
for part in ${BENCH_PARTS:-dataplane programming}; do
	program=$part
	[[ $part != dataplane ]] || program=run
	"$out/$program" "${quick[@]}" -json "$out/$part.json"
	parts+=("$out/$part.json")
done
"$out/report" -command "$command" ${BENCH_REPORT:-} "${parts[@]}"
