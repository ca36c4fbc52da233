#!/usr/bin/env bash
# Makes sure that a Debian machine has what building, running and testing kproxy
# needs. Fast when all is there; otherwise it installs Debian's packages, and Go
# (test/go.sh), for which it has to be root.
#
# Usage: test/setup.sh build|run|vm|bench|arm64|conformance|test
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin

# What each purpose needs, as command=package; a path stands for itself.
build=()
run=(iptables=iptables ipset=ipset nft=nftables ip=iproute2)
test=(conntrack=conntrack socat=socat ping=iputils-ping ps=procps curl=curl git=git gcc=gcc /usr/include/stdlib.h=libc6-dev
	node=nodejs chromium=chromium /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf=fonts-dejavu-core
	runc=runc /usr/share/containers/seccomp.json=golang-github-containers-common skopeo=skopeo docker-registry=docker-registry)
# What kproxy is measured beside.
bench=(haproxy=haproxy nginx=nginx /usr/lib/nginx/modules/ngx_stream_module.so=libnginx-mod-stream)
# What nodes of a cluster run, and what upstream's tests run in their pods.
arm64=(qemu-aarch64-static=qemu-user-static)
conformance=(runc=runc /usr/lib/cni/bridge=containernetworking-plugins conntrack=conntrack busybox=busybox-static gcc=gcc /usr/include/stdlib.h=libc6-dev
	curl=curl wget=wget nc.openbsd=netcat-openbsd iperf=iperf dig=bind9-dnsutils host=bind9-host nsenter=util-linux git=git)
# The VM runs this machine's programs, so it takes a machine of its own kind.
vm=()
if [[ $(uname -m) == x86_64 ]]; then
	vm=(qemu-system-x86_64=qemu-system-x86 busybox=busybox-static modprobe=kmod setpriv=util-linux ipvsadm=ipvsadm
		gcc=gcc /usr/include/stdlib.h=libc6-dev make=make flex=flex bison=bison bc=bc xz=xz-utils)
fi

case "${1:-}" in
build) needs=("${build[@]}") ;;
run) needs=("${run[@]}") ;;
vm) needs=("${run[@]}" "${vm[@]}") ;;
arm64) needs=("${arm64[@]}") ;;
bench) needs=("${run[@]}" "${bench[@]}") ;;
conformance) needs=("${run[@]}" "${conformance[@]}") ;;
test) needs=("${run[@]}" "${test[@]}" "${bench[@]}" "${vm[@]}" "${conformance[@]}") ;;
*)
	echo "usage: test/setup.sh build|run|vm|bench|arm64|conformance|test" >&2
	exit 2
	;;
esac

# A server that is installed is started and will be at every boot, unless
# policy-rc.d says no (invoke-rc.d(8)) and it is disabled afterwards. Nobody here
# asked for one: only its program is wanted.
install_without_starting() {
	local policy=/usr/sbin/policy-rc.d server
	if [[ ! -e $policy ]]; then
		trap 'rm -f /usr/sbin/policy-rc.d' EXIT
		printf '#!/bin/sh\nexit 101\n' >"$policy"
		chmod 755 "$policy"
	fi
	apt-get install -q -y --no-install-recommends "$@"
	for server in haproxy nginx docker-registry; do
		if [[ " $* " == *" $server "* ]] && command -v systemctl >/dev/null; then
			systemctl disable -q "$server" || true
		fi
	done
}

# Debian 12's Go 1.19 is too old to fetch the toolchain that go.mod asks for;
# from 1.21 on Go does, and names here the one it really uses.
want=go$(awk '$1 == "go" { print $2 }' go.mod)
have=$(go env GOVERSION 2>/dev/null || true)
new_enough() { [[ $(printf '%s\n' "$want" "$have" | sort -V | head -n 1) == "$want" ]]; }
if ! new_enough; then
	needs+=(curl=curl unzip=unzip /etc/ssl/certs/ca-certificates.crt=ca-certificates)
fi

missing=()
for need in "${needs[@]}"; do
	what=${need%%=*}
	if [[ $what == /* ]]; then
		[[ -e $what ]] || missing+=("${need#*=}")
	else
		command -v "$what" >/dev/null || missing+=("${need#*=}")
	fi
done

if ((${#missing[@]})); then
	if ! command -v apt-get >/dev/null; then
		echo "kproxy needs these programs, and this machine has no apt-get to install them with: ${missing[*]}" >&2
		exit 3
	fi
	if ((EUID != 0)); then
		echo "kproxy needs Debian packages that are missing; as root run: apt-get install ${missing[*]}" >&2
		exit 3
	fi
	echo "installing ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -q
	install_without_starting "${missing[@]}"
fi

if ! new_enough; then
	if ((EUID != 0)); then
		echo "kproxy is built with $want or newer, and this machine has ${have:-no Go}; as root run: test/go.sh $want" >&2
		exit 3
	fi
	test/go.sh "$want"
	hash -r
	have=$(go env GOVERSION)
	if ! new_enough; then
		echo "$(command -v go) is $have, and comes before /usr/local/go/bin in PATH: let it come after" >&2
		exit 3
	fi
fi

# Not a package of the list: it would start a server.
[[ $1 != test ]] || test/monitoring/promtool.sh >/dev/null
