#!/usr/bin/env bash
# Runs every check and test several times, every second time beside a load on all processors,
# and prints what each stage took in each run and what failed. It fails when a run did.
# What a run says stays in bin/again/.
#
# Usage: test/again.sh N
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-}
if [[ ! $runs =~ ^[1-9][0-9]*$ ]]; then
	echo "usage: test/again.sh N" >&2
	exit 2
fi
longest=3h # of a load, should this script be killed
export GOFLAGS="${GOFLAGS:-} -count=1" # what has passed before runs too
out=bin/again
rm -rf "$out"
mkdir -p "$out"

# start_load keeps all processors busy, by a process group of its own.
load=
start_load() {
	setsid timeout "$longest" bash -c 'for ((i = 0; i < $(nproc); i++)); do while :; do :; done & done; wait' &
	load=$!
	disown # so that bash doesn't say that it was killed
}

stop_load() {
	[[ -z $load ]] || kill -KILL -- "-$load" 2>/dev/null || true
	load=
}
trap stop_load EXIT
trap 'exit 130' INT TERM HUP

status=0
for ((i = 1; i <= runs; i++)); do
	name=quiet
	if ((i % 2 == 0)); then
		name=loaded
		start_load
	fi
	echo "run $i of $runs, $name" >&2
	began=$SECONDS
	result=passed
	test/run.sh >"$out/$i" 2>&1 || result=FAILED status=1
	stop_load
	echo "$i $name $((SECONDS - began)) $result" >>"$out/runs"
done

# A column a run: the stages in the order in which they first ended.
awk '
	FILENAME ~ /\/runs$/ { runs++; kind[$1] = $2; took["all", $1] = $3 "s"; result[$1] = $4; next }
	{ run = FILENAME; sub(/.*\//, "", run) }
	/^stage / {
		name = ""
		for (i = 2; $i !~ /^[0-9]+s,?$/; i++) name = name (name == "" ? "" : " ") $i
		if (!(name in seen)) { seen[name] = 1; order[++stages] = name }
		sub(/,/, "", $i)
		took[name, run] = $i
	}
	/^[0-9]+ passed, / { failed[run] = $3 }
	/^failed: / { print "run " run " " $0 }
	function row(title, values, i) { printf "%-40s", title; for (i = 1; i <= runs; i++) printf " %8s", values[i]; print "" }
	END {
		row("run", kind)
		order[++stages] = "all"
		for (s = 1; s <= stages; s++) { for (i = 1; i <= runs; i++) v[i] = took[order[s], i]; row(order[s], v) }
		row("tests that failed", failed)
		row("result", result)
	}' "$out/runs" $(seq -f "$out/%g" "$runs")
exit $status
