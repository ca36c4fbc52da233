#!/usr/bin/env bash
# Runs a command as root in a virtual machine with Debian's stock kernel, which
# has IPVS, and with this machine's files: same programs, same paths, same
# folder. What it writes is lost, and this machine is out of its reach. Its
# output comes as it is made, and its status is this one's; 125 means that the
# guest failed: an oops, a hang, silence, or no status.
#
# Usage: test/vm/run.sh COMMAND [ARGUMENT...]
#
# It keeps PATH, HOME, CI and every KPROXY_* and GO*, adds KPROXY_E2E_SLOW (how
# many times slower than usual it may be here), and has no standard input.
# KPROXY_VM_TIMEOUT  seconds for all of it (1200)
# KPROXY_VM_SILENCE  seconds without a sign of life that mean a hang (90)
# KPROXY_VM_MEMORY   of the guest, as qemu wants it (4G)
# KPROXY_VM_ACCEL    kvm or tcg (kvm where it works)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

(($#)) || { echo "usage: test/vm/run.sh COMMAND [ARGUMENT...]" >&2; exit 2; }
for program in qemu-system-x86_64 busybox modprobe depmod setpriv; do
	command -v $program >/dev/null || { echo "vm: $program is missing; test/setup.sh vm installs it" >&2; exit 3; }
done

kernel=$("$here/kernel.sh")
run=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-vm.XXXXXX")
qemu=
finish() {
	[[ -z $qemu ]] || kill -KILL "$qemu" 2>/dev/null || true
	rm -rf "$run"
}
trap finish EXIT
trap 'exit 130' INT TERM HUP

"$here/initramfs.sh" "$kernel" >"$run/initramfs"
accel=${KPROXY_VM_ACCEL:-$("$here/accel.sh" "$kernel" "$run/initramfs")}
slow=1
[[ $accel == kvm ]] || slow=10

# As many guests at a time as there are processors: each keeps up to two busy, and
# more would only make each other slow, too slow for what they test.
slots=${XDG_RUNTIME_DIR:-/run/lock}
until [[ -n ${slot:-} ]]; do
	for ((i = 0; i < $(nproc); i++)); do
		exec {slot}>"$slots/kproxy-vm.$i.lock"
		flock -n "$slot" && break 2
		exec {slot}>&-
	done
	slot=
	sleep 0.5
done
SECONDS=0

# The guest runs this file.
{
	for name in PATH HOME CI "${!KPROXY_@}" "${!GO@}"; do
		[[ -z ${!name+set} ]] || printf 'export %s=%q\n' "$name" "${!name}"
	done
	echo "export KPROXY_E2E_SLOW=$slow TMPDIR=/run/tmp"
	printf 'cd %q || exit 125\n' "$PWD"
	printf '%q ' "$@"
} >"$run/command"
echo "$kernel"/lib/modules/* >"$run/modules"
touch "$run"/{stdout,stderr,console,heartbeat}

# The kernel's own watchdogs are off, and its check of the timer: a guest that
# waits for the host's processors isn't hung.
append="console=ttyS0 quiet oops=panic panic=-1 mitigations=off tsc=reliable nowatchdog no_timer_check \
rcupdate.rcu_cpu_stall_suppress=1 vm.guest=$here/guest.sh"
machine=(-machine q35 -m "${KPROXY_VM_MEMORY:-4G}" -display none -monitor none -no-reboot -nic none)
case $accel in
kvm) machine+=(-accel kvm -cpu host -smp 2) ;;
*)
	# qemu keeps translated code by virtual address, so with randomized addresses it
	# translates ld.so and libc anew for every process: ten times slower. And two
	# processors cost three times the work of one, in telling each other's caches.
	append+=" norandmaps"
	machine+=(-accel tcg -cpu Nehalem -smp 1)
	;;
esac
share=local,security_model=none
# It must not outlive this script, however that ends.
setpriv --pdeathsig KILL qemu-system-x86_64 "${machine[@]}" \
	-kernel "$kernel/vmlinuz" -initrd "$run/initramfs" -append "$append" \
	-serial "file:$run/console" \
	-fsdev $share,id=host,path=/,multidevs=remap,readonly=on -device virtio-9p-pci,fsdev=host,mount_tag=host \
	-fsdev $share,id=run,path="$run" -device virtio-9p-pci,fsdev=run,mount_tag=run \
	</dev/null >"$run/qemu" 2>&1 &
qemu=$!
tail --pid=$qemu -s 0.1 -n +1 -f "$run/stdout" &
tails=($!)
tail --pid=$qemu -s 0.1 -n +1 -f "$run/stderr" >&2 &
tails+=($!)

timeout=${KPROXY_VM_TIMEOUT:-1200} silence=${KPROXY_VM_SILENCE:-90}
why=
while kill -0 $qemu 2>/dev/null; do
	sleep 0.2
	if ((SECONDS > timeout)); then
		why="not done after $timeout s"
	elif (($(date +%s) - $(stat -c %Y "$run/heartbeat") > silence)); then
		why="no sign of life for $silence s"
	fi
	[[ -z $why ]] || { kill -KILL $qemu; break; }
done
wait $qemu || true
qemu=
wait "${tails[@]}"

if grep -qE 'Kernel panic|Oops|BUG: |general protection fault' "$run/console"; then
	why="the kernel failed${why:+, and $why}"
elif [[ -z $why && ! -s $run/status ]]; then
	why="it ended without a status"
fi
if [[ -n $why ]]; then
	{
		echo "vm: $why; the end of its console:"
		tail -n 60 "$run/console" | tr -d '\r'
		cat "$run/qemu"
	} >&2
	exit 125
fi
exit "$(<"$run/status")"
