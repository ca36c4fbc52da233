#!/bin/bash
# The guest's process 1 on the host's root: makes a system of it, runs the
# command, leaves its status, and ends the guest. /run/vm is the run's folder on
# the host, see run.sh; everything else that is written here is lost.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t cgroup2 cgroup /sys/fs/cgroup # for containers
mkdir -p /dev/pts /dev/shm /run/lock /run/netns /run/tmp
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /run/tmp
ln -s /proc/self/fd /dev/fd
for n in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${n%:*}" "/dev/${n#*:}"; done

# A sign of life for the host, which takes a guest without it for hung. It waits without a program, as to start one is slow.
mkfifo /run/nothing
while :; do
	echo alive >>/run/vm/heartbeat
	read -rt 2 <>/run/nothing
done &

mkdir -p /lib/modules
ln -sfn "$(</run/vm/modules)" "/lib/modules/$(uname -r)"
modprobe br_netfilter # as on nodes whose pods are on a bridge
hostname kproxy-vm
ip link set lo up
ulimit -Hn 524288 # what systemd gives; the kernel's own 4096 is for nobody

uml= # user-mode Linux
! grep -q ' vm.run=' /proc/cmdline || uml=yes
if [[ -s /run/vm/write ]]; then
	folder=$(</run/vm/write)
	if [[ $uml ]]; then
		/bin/busybox mount -t hostfs -o "$folder" none "$folder"
	else
		mount -t 9p -o cache=none,trans=virtio,version=9p2000.L,msize=512000 write "$folder"
	fi
fi

# Pipes, as a command that opens /dev/stderr again would otherwise truncate the file.
exec 3> >(exec cat >>/run/vm/stdout)
out=$!
exec 4> >(exec cat >>/run/vm/stderr)
err=$!
/bin/bash /run/vm/command </dev/null >&3 2>&4 3>&- 4>&-
status=$?
exec 3>&- 4>&-
# What the command left running may keep the pipes open; it has had its time.
for ((i = 0; i < 50; i++)); do
	kill -0 $out 2>/dev/null || kill -0 $err 2>/dev/null || break
	sleep 0.1
done
echo "$status" >/run/vm/status
[[ ! $uml ]] || /bin/busybox poweroff -f
echo b >/proc/sysrq-trigger # the fastest way out: qemu may not reboot
sleep infinity
