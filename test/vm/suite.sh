#!/usr/bin/env bash
# Runs compiled tests inside the guest and prints their events (go doc
# test2json).
#
# Usage: suite.sh TEST2JSON BINARY PACKAGE [ARGUMENT...]
set -euo pipefail
test2json=$1 binary=$2 package=$3
shift 3
"$test2json" -t -p "$package" "$binary" -test.v=test2json -test.timeout=25m "$@" || true # the events say so
