#!/bin/busybox sh
# The first process of the guest. It lays a writable layer over the host's root
# and goes on there with guest.sh. What it was told is on the kernel's command
# line: vm.guest=PATH, or vm.probe when the question is only whether it boots.
bb=/bin/busybox
run=
$bb mount -t proc proc /proc
$bb mount -t devtmpfs dev /dev
for word in $($bb cat /proc/cmdline); do
	case $word in
	vm.guest=*) guest=${word#*=} ;;
	vm.run=*) run=${word#*=} ;; # of user-mode Linux, which sees the host's files by their paths
	vm.probe)
		echo "<0>vm: it boots" >/dev/kmsg # which is out before the next line, unlike what a terminal gets
		$bb reboot -f
		;;
	esac
done

while read -r module; do
	$bb insmod "/modules/$module" || echo "vm: insert $module: failed"
done </modules/order

set -e # a failure from here on ends init, and so the guest, with a panic

# share TAG FOLDER OPTIONS PATH mounts what run.sh shares, a folder PATH of the host.
share() {
	if [ "$run" ]; then
		$bb mount -t hostfs -o "$4" none "$2"
	else
		$bb mount -t 9p -o "$3,trans=virtio,version=9p2000.L,msize=512000" "$1" "$2"
	fi
}

# Loose: nobody changes the host's files under a guest that it should see.
share host /host ro,cache=loose /
$bb mount -t tmpfs -o size=75% rw /rw
$bb mkdir /rw/upper /rw/work
$bb mount -t overlay -o lowerdir=/host,upperdir=/rw/upper,workdir=/rw/work overlay /new
$bb mount -t tmpfs run /new/run
$bb mkdir -p /new/run/vm
share run /new/run/vm rw,cache=none "$run"
$bb mount --move /dev /new/dev
$bb umount /proc
exec $bb switch_root /new "$guest"
