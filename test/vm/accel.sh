#!/usr/bin/env bash
# Prints the fastest kind of guest that really boots here:
#
#   kvm  Debian's stock kernel on this machine's processors. A /dev/kvm says
#        little: on rented machines it can exist and hang.
#   uml  the same source as a process of this machine, where usermode.sh has
#        built it and tracing isn't forbidden
#   tcg  the stock kernel on emulated processors: always, and ten times slower
#
# What boots is found out once per boot of this machine.
#
# Usage: test/vm/accel.sh CACHE
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=$1
given=${KPROXY_VM_KERNEL:-} # then only what boots that
boot=$(</proc/sys/kernel/random/boot_id)

# start KIND KERNEL begins a guest that ends when it has written that it boots.
start() {
	if [[ $1 == uml ]]; then
		setpriv --pdeathsig KILL "$here/uml.sh" "$2" "$tmp/initramfs" "$tmp/console" 512M vm.probe 9>&- &
	else
		setpriv --pdeathsig KILL qemu-system-x86_64 -machine q35 -accel kvm -cpu host -smp 2 -m 512M -display none -monitor none \
			-no-reboot -nic none -kernel "$2/vmlinuz" -initrd "$tmp/initramfs" -append 'console=ttyS0 quiet panic=-1 vm.probe' \
			-serial "file:$tmp/console" </dev/null >/dev/null 2>&1 9>&- &
	fi
	disown # so that bash doesn't say that it was killed
}

# boots KIND KERNEL is true if such a guest says so within 20 s; the answer is kept.
boots() {
	local verdict i
	verdict=$cache/boots-$1-$(sha256sum <<<"$2" | cut -c1-12)-$boot
	if [[ ! -s $verdict ]]; then
		tmp=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-vm-accel.XXXXXX")
		"$here/initramfs.sh" "$2" >"$tmp/initramfs" || exit
		: >"$tmp/console"
		start "$1" "$2"
		for ((i = 0; i < 200; i++)); do # and no waiting for what can't be killed
			kill -0 $! 2>/dev/null || break
			sleep 0.1
		done
		kill -KILL $! -$! 2>/dev/null || true # also what a User Mode Linux leaves, as in run.sh
		if grep -q 'vm: it boots' "$tmp/console"; then echo yes; else echo no; fi >"$verdict"
		rm -rf "$tmp"
	fi
	[[ $(<"$verdict") == yes ]]
}

exec 9>"$cache/accel-lock"
flock 9
find "$cache" -maxdepth 1 -name 'boots-*' ! -name "*-$boot" -delete
if [[ -w /dev/kvm ]] && kernel=${given:-$("$here/kernel.sh" "$cache")} && boots kvm "$kernel"; then
	echo kvm
elif [[ -z $given ]] && kernel=$("$here/usermode.sh" "$cache") && boots uml "$kernel"; then
	echo uml
else
	echo tcg
fi
