#!/usr/bin/env bash
# Becomes a User Mode Linux, see usermode.sh: the process is the kernel, and the
# guest's processes are its children.
#
# Usage: test/vm/uml.sh KERNEL-FOLDER INITRAMFS CONSOLE-FILE MEMORY WORD...
#
# The words go to the kernel's command line.
set -euo pipefail
kernel=$1 initramfs=$2 console=$3 memory=$4
shift 4
export LD_PRELOAD=$kernel/xstate.so
exec "$kernel/linux" mem="$memory" initrd="$initramfs" \
	con=null con0=null,fd:1 quiet noreboot panic=-1 dummy.numdummies=0 "$@" </dev/null >"$console" 2>&1
