#!/usr/bin/env bash
# A node, from the inside of its namespaces of processes, mounts, network and host name: makes
# its file systems, waits for its link, then runs containerd and the kubelet until one ends.
#
# Usage: node.sh NAME FOLDER ADDRESS4 ADDRESS6 PROGRAMS
# FOLDER holds what the node keeps when it is restarted, and etc/, its configuration.
set -euo pipefail
name=$1 folder=$2 address4=$3 address6=$4 programs=$5
hostname "$name"

# Control groups stay the machine's; the rest of /sys is that of this network.
mkdir -p "$folder"/{groups,var,log,etc}
mount --rbind /sys/fs/cgroup "$folder/groups"
mount -t sysfs sysfs /sys
mount --rbind "$folder/groups" /sys/fs/cgroup
umount -R "$folder/groups"
mount -t tmpfs tmpfs /run
mkdir -p /run/lock
mount -t tmpfs tmpfs /mnt
# A folder on /etc, where the machine has none of this name, takes an overlay.
mkdir -p "$folder"/{overlay,work}
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$folder/overlay,workdir=$folder/work" /etc
mkdir -p /etc/node
mount --bind "$folder/etc" /etc/node
mount --bind "$folder/var" /var/lib
mount --bind "$folder/log" /var/log
# What the kubelet sets for the whole machine it finds set already.
while IFS== read -r key value; do
	echo "$value" >"/mnt/${key//\//.}"
	mount --bind "/mnt/${key//\//.}" "/proc/sys/$key"
done <<-END
	vm/overcommit_memory=1
	vm/panic_on_oom=0
	kernel/panic=10
	kernel/panic_on_oops=1
	kernel/keys/root_maxkeys=1000000
	kernel/keys/root_maxbytes=25000000
END
mount --make-rshared / # for mounts of pods that propagate

hierarchies=(/sys/fs/cgroup/*/) # of control groups version 1
[[ ! -e /sys/fs/cgroup/cgroup.controllers ]] || hierarchies=(/sys/fs/cgroup/)
for hierarchy in "${hierarchies[@]}"; do
	[[ -e $hierarchy/cgroup.procs ]] || continue
	group=${hierarchy}kproxy-conformance
	mkdir -p "$group/$name"
	for file in cpuset.cpus cpuset.mems; do # where they aren't the parent's by themselves
		[[ -e $hierarchy/$file ]] || continue
		cat "$hierarchy/$file" >"$group/$file"
		cat "$hierarchy/$file" >"$group/$name/$file"
	done
done

ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip address add "$address4/24" dev eth0
ip address add "$address6/64" dev eth0 nodad
ip link set eth0 up
ip route add default via 172.31.0.1
ip -6 route add default via fd00:31::1
while read -r route; do ip route replace $route; done </etc/node/routes
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
sysctl -qw net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1 2>/dev/null || true # what kubeadm asks for

PATH=$programs/bin:$PATH
containerd -c /etc/node/containerd.toml >>"$folder/containerd.log" 2>&1 &
until [[ -S /run/containerd/containerd.sock ]]; do sleep 0.1; done
if [[ ! -e /var/lib/imported ]]; then
	for image in "$programs"/images/*.tar; do
		ctr -n k8s.io images import "$image" >>"$folder/containerd.log" 2>&1
	done
	touch /var/lib/imported
fi
kubelet --config /etc/node/kubelet.yaml --kubeconfig /etc/node/kubeconfig --hostname-override "$name" \
	--cgroup-root "/kproxy-conformance/$name" --node-ip "$address4,$address6" --node-labels "topology.kubernetes.io/zone=$(cat /etc/node/zone)" \
	--v 2 >>"$folder/kubelet.log" 2>&1 &
wait -n
