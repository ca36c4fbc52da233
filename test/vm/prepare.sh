#!/usr/bin/env bash
# Makes sure that guests are as fast here as they can be: where KVM doesn't work,
# it has User Mode Linux built, once on a machine, in the time that others leave.
#
# Usage: test/vm/prepare.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kproxy-vm
mkdir -p "$cache"
[[ $("$here/accel.sh" "$cache") == kvm ]] || chrt --idle 0 "$here/usermode.sh" "$cache" build >/dev/null
