#!/usr/bin/env bash
# Fetches or builds the guests' kernels and finds out how they boot, in the time that others leave.
#
# Usage: test/vm/prepare.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kproxy-vm
mkdir -p "$cache"
"$here/kernel.sh" "$cache"
"$here/accel.sh" "$cache"
((EUID)) || "$here/uml.sh" "$cache"
