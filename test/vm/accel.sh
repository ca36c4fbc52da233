#!/usr/bin/env bash
# Prints kvm if a guest really boots with it, else tcg (emulation). A /dev/kvm
# says little: on rented machines it can exist and hang. So it is tried, once
# per boot of this machine.
#
# Usage: test/vm/accel.sh CACHE KERNEL-FOLDER INITRAMFS
set -euo pipefail
cache=$1 kernel=$2 initramfs=$3
verdict=$cache/accel-$(</proc/sys/kernel/random/boot_id)

if [[ ! -w /dev/kvm ]]; then
	echo tcg
	exit
fi
exec 9>"$cache/accel-lock"
flock 9
if [[ ! -s $verdict ]]; then
	console=$(mktemp "${TMPDIR:-/tmp}/kproxy-vm-accel.XXXXXX")
	trap 'rm -f "$console"' EXIT
	setpriv --pdeathsig KILL qemu-system-x86_64 -machine q35 -accel kvm -cpu host -smp 2 -m 512M -display none -monitor none \
		-no-reboot -nic none -kernel "$kernel/vmlinuz" -initrd "$initramfs" -append 'console=ttyS0 quiet panic=-1 vm.probe' \
		-serial "file:$console" </dev/null >/dev/null 2>&1 9>&- &
	for ((i = 0; i < 200; i++)); do # 20 s, and no waiting for what can't be killed
		kill -0 $! 2>/dev/null || break
		sleep 0.1
	done
	kill -KILL $! 2>/dev/null || true
	result=tcg
	! grep -q 'vm: it boots' "$console" || result=kvm
	rm -f "$cache"/accel-*-* # of earlier boots
	echo $result >"$verdict"
fi
cat "$verdict"
