#!/usr/bin/env bash
# Runs a command as root in a virtual machine with a kernel that has IPVS,
# Debian's or user-mode Linux, and with this machine's files: same programs, same paths, same
# folder. What it writes is lost, and this machine is out of its reach. Its
# output comes as it is made, and its status is this one's; 125 means that the
# guest failed: an oops, a hang, silence, or no status.
#
# Usage: test/vm/run.sh COMMAND [ARGUMENT...]
#
# It keeps PATH, HOME, CI and every KPROXY_* and GO*, adds KPROXY_E2E_SLOW (how
# many times slower than usual it may be here), and has no standard input.
# KPROXY_VM_TIMEOUT  seconds for all of it (1200)
# KPROXY_VM_SILENCE  seconds without a sign of life that mean a hang (240)
# KPROXY_VM_MEMORY   of the guest, as qemu wants it (4G)
# KPROXY_VM_ACCEL    kvm or tcg (the first that works, see accel.sh), or uml: user-mode Linux (uml.sh), a kernel that is a program of
#                    this machine and boots in a second; root may start it.
# KPROXY_VM_CLOCK    real: user-mode Linux waits for what there is to wait for. Otherwise its clock skips that, and stands still
#                    while something runs: nothing is late because the machine is busy, and only work takes time.
# KPROXY_VM_PACKAGE  Debian's package of the kernel (linux-image-amd64)
# KPROXY_VM_KERNEL   a folder with another kernel's vmlinuz and lib/modules
# KPROXY_VM_WRITE    a folder in which the guest's changes stay (none)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kproxy-vm
guest= # its process, while it runs
why=   # what is wrong with the guest

prepare() {
	local program machine=qemu-system-x86_64 # or what builds one
	[[ ${KPROXY_VM_ACCEL:-} != uml ]] || machine='gcc make flex bison bc xz'
	for program in $machine busybox modprobe depmod setpriv; do
		command -v $program >/dev/null || { echo "vm: $program is missing; test/setup.sh vm installs it" >&2; exit 3; }
	done
	mkdir -p "$cache"
	run=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-vm.XXXXXX")
	trap finish EXIT
	trap 'exit 130' INT TERM HUP
	accel=${KPROXY_VM_ACCEL:-$("$here/accel.sh" "$cache")}
	if [[ $accel == uml ]]; then
		kernel=$("$here/uml.sh" "$cache")
	else
		kernel=${KPROXY_VM_KERNEL:-$("$here/kernel.sh" "$cache")}
	fi
	"$here/initramfs.sh" "$kernel" >"$run/initramfs"
	echo "$kernel"/lib/modules/* >"$run/modules"
	touch "$run"/{stdout,stderr,console,qemu}
	[[ -z ${KPROXY_VM_WRITE:-} ]] || realpath "$KPROXY_VM_WRITE" >"$run/write"
}

finish() {
	[[ -z $guest ]] || end_guest
	rm -rf "$run"
}

end_guest() { kill -KILL "$guest" 2>/dev/null || true; }

# script prints what the guest runs.
script() {
	local name slow=1
	case $accel in
	tcg) slow=6 ;;
	esac
	for name in PATH HOME CI "${!KPROXY_@}" "${!GO@}"; do
		[[ -z ${!name+set} ]] || printf 'export %s=%q\n' "$name" "${!name}"
	done
	echo "export KPROXY_E2E_SLOW=${KPROXY_E2E_SLOW:-$slow} TMPDIR=/run/tmp"
	printf 'cd %q || exit 125\n' "$PWD"
	printf '%q ' "$@"
}

# boot starts the guest, and what passes its output on. It must not outlive this
# script, however that ends.
boot() {
	if [[ $accel == uml ]]; then boot_uml; else boot_qemu; fi
	tail --pid=$guest -s 0.1 -n +1 -f "$run/stdout" &
	tails=($!)
	tail --pid=$guest -s 0.1 -n +1 -f "$run/stderr" >&2 &
	tails+=($!)
}

# boot_uml keeps the guest's processes, which are processes of this machine, in a namespace that ends with it, and on a processor
# that no other guest has, if there is one: they run in turns, and to wake one on another processor costs three times as much. Its
# memory is a file.
boot_uml() {
	local range cpu on=() travel=
	for range in $(awk '/^Cpus_allowed_list/ { gsub(",", " "); $1 = ""; print }' /proc/self/status); do
		for cpu in $(seq "${range%-*}" "${range#*-}"); do
			exec 9>"$cache/processor-$cpu" # held until this script ends
			! flock -n 9 || { on=(taskset -c "$cpu"); break 2; }
		done
	done
	[[ ${KPROXY_VM_CLOCK:-} == real ]] || travel=time-travel=inf-cpu
	TMPDIR=/dev/shm "${on[@]}" setpriv --pdeathsig KILL unshare --pid --fork --kill-child \
		"$kernel/linux" $travel seccomp=on "mem=${KPROXY_VM_MEMORY:-4G}" con=null con0=null,fd:1 ssl=null quiet oops=panic \
		"initrd=$run/initramfs" "vm.guest=$here/guest.sh" "vm.run=$run" </dev/null >"$run/console" 2>&1 &
	guest=$!
}

boot_qemu() {
	# The kernel's own watchdogs are off, and its check of the timer: a guest that
	# waits for the host's processors isn't hung.
	local words=(console=ttyS0 quiet oops=panic panic=-1 mitigations=off nowatchdog no_timer_check rcupdate.rcu_cpu_stall_suppress=1
		"vm.guest=$here/guest.sh")
	local machine=(-machine q35 -m "${KPROXY_VM_MEMORY:-4G}" -display none -monitor none -no-reboot -nic none)
	if [[ $accel == kvm ]]; then
		machine+=(-accel kvm -cpu host -smp 2)
	else
		# qemu keeps translated code by virtual address, so with randomized addresses it
		# translates ld.so and libc anew for every process: ten times slower. And two
		# processors cost three times the work of one, in telling each other's caches.
		words+=(norandmaps)
		# While the host is busy the guest gets the rate of its TSC and of its APIC's timer
		# wrong, by a factor of ten and more; the HPET's isn't measured but known.
		words+=(tsc=unstable clocksource=hpet nolapic_timer)
		machine+=(-accel tcg -cpu Nehalem -smp 1)
	fi
	share host / multidevs=remap,readonly=on
	share run "$run" multidevs=forbid
	if [[ -s $run/write ]]; then
		share write "$(<"$run/write")" multidevs=forbid
	fi
	setpriv --pdeathsig KILL qemu-system-x86_64 "${machine[@]}" -serial "file:$run/console" \
		-kernel "$kernel/vmlinuz" -initrd "$run/initramfs" -append "${words[*]}" </dev/null >"$run/qemu" 2>&1 &
	guest=$!
}

# share TAG FOLDER OPTIONS makes a folder of the host one that the guest can mount.
share() {
	machine+=(-fsdev "local,id=$1,path=$2,security_model=none,$3" -device "virtio-9p-pci,fsdev=$1,mount_tag=$1")
}

# watch waits for the guest's end, or makes one.
watch() {
	local timeout=${KPROXY_VM_TIMEOUT:-1200} silence=${KPROXY_VM_SILENCE:-240} life
	SECONDS=0
	touch "$run/heartbeat"
	while kill -0 "$guest" 2>/dev/null; do
		sleep 0.5
		life=$(stat -c %Y "$run/heartbeat")
		if ((SECONDS > timeout)); then
			why="not done after $timeout s"
		elif ((EPOCHSECONDS - life > silence)); then
			why="no sign of life for $silence s"
		fi
		# User-mode Linux stays where it panicked.
		[[ -z $why && ($accel != uml || -z $(grep 'Kernel panic' "$run/console")) ]] || end_guest
	done 2>/dev/null # bash says that it was killed
	wait "$guest" || true
	guest=
	wait "${tails[@]}"
}

# judge ends this script with the command's status, or says what went wrong.
judge() {
	if grep -qE 'Kernel panic|Oops|BUG: |general protection fault' "$run/console"; then
		why="the kernel failed${why:+, and $why}"
	elif [[ -z $why && ! -s $run/status ]]; then
		why="it ended without a status"
	fi
	[[ -n $why ]] || exit "$(<"$run/status")"
	{
		echo "vm: $why; the end of its console:"
		tail -n 60 "$run/console" | tr -d '\r'
		cat "$run/qemu"
	} >&2
	exit 125
}

main() {
	(($#)) || { echo "usage: test/vm/run.sh COMMAND [ARGUMENT...]" >&2; exit 2; }
	prepare
	script "$@" >"$run/command"
	boot
	watch
	judge
}

main "$@"
exit # whatever this file says by now: bash reads it as it goes
