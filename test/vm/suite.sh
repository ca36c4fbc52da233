#!/usr/bin/env bash
# Runs compiled tests inside the guest and prints their events (go doc
# test2json). On an emulated machine a few tests that fail are run once more,
# alone: what they measure in real time fails there when others take the only
# processor at the wrong moment. The second result counts.
#
# Usage: suite.sh TEST2JSON BINARY PACKAGE [ARGUMENT...]
set -euo pipefail
test2json=$1 binary=$2 package=$3
shift 3
most=6 # more than these don't fail by chance

trap 'printf "{\"Action\":\"stage\",\"Package\":\"guest %s\",\"Elapsed\":%d}\n" "${package#*/*/}" $SECONDS' EXIT
first=$(mktemp)
"$test2json" -t -p "$package" "$binary" -test.v=test2json -test.timeout=25m "$@" | tee "$first" || true
failed=$(sed -n 's/.*"Action":"fail".*"Test":"\([^"/]*\)".*/\1/p' "$first" | sort -u)
if [[ -z $failed || ${KPROXY_E2E_SLOW:-1} == 1 || $(wc -w <<<"$failed") -gt $most ]] || grep -q 'panic: ' "$first"; then
	exit
fi
names=$(paste -sd'|' <<<"$failed")
echo "vm: once more, alone: $names" >&2
for test in $failed; do
	printf '{"Action":"again","Package":"%s","Test":"%s"}\n' "$package" "$test"
done
"$test2json" -t -p "$package" "$binary" -test.v=test2json -test.timeout=25m "$@" -test.parallel=1 -test.run="^($names)\$" || true
