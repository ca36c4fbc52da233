#!/usr/bin/env bash
# Prints the faster kind of guest that really boots here:
#
#   kvm  on this machine's processors. A /dev/kvm says little: on rented machines it can exist and hang.
#   tcg  on emulated ones: always, and several times slower
#
# What boots is found out once per boot of this machine.
#
# Usage: test/vm/accel.sh CACHE
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=$1
boot=$(</proc/sys/kernel/random/boot_id)

# boots KERNEL is true if a guest of KVM's says so within 20 s; the answer is kept.
boots() {
	local verdict i
	verdict=$cache/boots-kvm-$(sha256sum <<<"$1" | cut -c1-12)-$boot
	if [[ ! -s $verdict ]]; then
		tmp=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-vm-accel.XXXXXX")
		"$here/initramfs.sh" "$1" >"$tmp/initramfs" || exit
		: >"$tmp/console"
		setpriv --pdeathsig KILL qemu-system-x86_64 -machine q35 -accel kvm -cpu host -smp 2 -m 512M -display none -monitor none \
			-no-reboot -nic none -kernel "$1/vmlinuz" -initrd "$tmp/initramfs" -append 'console=ttyS0 quiet panic=-1 vm.probe' \
			-serial "file:$tmp/console" </dev/null >/dev/null 2>&1 9>&- &
		disown # so that bash doesn't say that it was killed
		for ((i = 0; i < 200; i++)); do # and no waiting for what can't be killed
			kill -0 $! 2>/dev/null || break
			sleep 0.1
		done
		kill -KILL $! 2>/dev/null || true
		if grep -q 'vm: it boots' "$tmp/console"; then echo yes; else echo no; fi >"$verdict"
		rm -rf "$tmp"
	fi
	[[ $(<"$verdict") == yes ]]
}

exec 9>"$cache/accel-lock"
flock 9
find "$cache" -maxdepth 1 -name 'boots-*' ! -name "*-$boot" -delete
if [[ -w /dev/kvm ]] && kernel=${KPROXY_VM_KERNEL:-$("$here/kernel.sh" "$cache")} && boots "$kernel"; then
	echo kvm
else
	echo tcg
fi
