#!/usr/bin/env bash
# A CNI plugin: connects a pod by a pair of interfaces of which the node's end has no address, as
# Calico does. The pod's gateway is a link-local address that the node answers for.
set -euo pipefail
config=$(cat)
link=pod$(sha256sum <<<"$CNI_CONTAINERID" | cut -c 1-11)
ipam() { /usr/lib/cni/host-local <<<"$config"; }
case $CNI_COMMAND in
ADD)
	pod=(ip -n "$(basename "$CNI_NETNS")")
	ip link add "$link" type veth peer name "$CNI_IFNAME" netns "$(basename "$CNI_NETNS")"
	sysctl -qw "net.ipv4.conf.$link.proxy_arp=1" "net.ipv4.neigh.$link.proxy_delay=0"
	ip address add fe80::1/64 dev "$link" nodad
	ip link set "$link" up
	"${pod[@]}" link set "$CNI_IFNAME" up
	ips=
	for address in $(ipam | grep -o '"address": *"[^"]*"' | cut -d '"' -f 4); do
		address=${address%/*}
		if [[ $address == *:* ]]; then
			"${pod[@]}" address add "$address/128" dev "$CNI_IFNAME" nodad
			"${pod[@]}" -6 route add default via fe80::1 dev "$CNI_IFNAME"
			ip -6 route add "$address/128" dev "$link"
			ips+=",{\"address\":\"$address/128\",\"interface\":0}"
		else
			"${pod[@]}" address add "$address/32" dev "$CNI_IFNAME"
			"${pod[@]}" route add 169.254.1.1 dev "$CNI_IFNAME" scope link
			"${pod[@]}" route add default via 169.254.1.1 dev "$CNI_IFNAME"
			ip route add "$address/32" dev "$link" scope link
			ips+=",{\"address\":\"$address/32\",\"interface\":0}"
		fi
	done
	printf '{"cniVersion":"1.0.0","interfaces":[{"name":"%s","sandbox":"%s"}],"ips":[%s]}' "$CNI_IFNAME" "$CNI_NETNS" "${ips#,}"
	;;
DEL)
	ipam
	ip link delete "$link" 2>/dev/null || true # it goes with the pod's namespace as well
	;;
VERSION) printf '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}' ;;
esac
