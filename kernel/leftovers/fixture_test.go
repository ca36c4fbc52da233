package leftovers_test

// What a node holds that isn't kube-proxy's: kubelet's chains, a firewall's and a
// network plugin's, some of them with names that begin in the same way.
const foreignRules = `*mangle
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:CNI-HOSTPORT-DNAT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-DROP - [0:0]
:KUBE-ROUTER-SNAT - [0:0]
:KUBE-SVC-NOTAHASH - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -s 10.244.0.0/16 -m comment --comment "a plugin's -j KUBE-SERVICES" -j KUBE-ROUTER-SNAT
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-ROUTER-SNAT -j MASQUERADE
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-NWPLCY-ABCDEFGHIJKLMNOP - [0:0]
:MINE - [0:0]
-A INPUT -p tcp -m tcp --dport 22 -j MINE
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A MINE -j ACCEPT
COMMIT
`

// iptablesMode is what kube-proxy 1.3x writes in mode iptables, for a service
// with two endpoints and affinity, one with a node port and source ranges, and
// one without endpoints.
const iptablesMode = `*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*nat
:KUBE-EXT-BBBBBBBBBBBBBBB2 - [0:0]
:KUBE-FW-BBBBBBBBBBBBBBB2 - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAA22 - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAA33 - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAA2 - [0:0]
:KUBE-SVC-BBBBBBBBBBBBBBB2 - [0:0]
:KUBE-SVL-BBBBBBBBBBBBBBB2 - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-EXT-BBBBBBBBBBBBBBB2 -s 10.244.0.0/16 -m comment --comment "pod traffic for shop/web external destinations" -j KUBE-SVC-BBBBBBBBBBBBBBB2
-A KUBE-EXT-BBBBBBBBBBBBBBB2 -m comment --comment "masquerade LOCAL traffic for shop/web external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-EXT-BBBBBBBBBBBBBBB2 -j KUBE-SVL-BBBBBBBBBBBBBBB2
-A KUBE-FW-BBBBBBBBBBBBBBB2 -s 203.0.113.0/24 -m comment --comment "shop/web loadbalancer IP" -j KUBE-EXT-BBBBBBBBBBBBBBB2
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web" -m tcp --dport 30080 -j KUBE-EXT-BBBBBBBBBBBBBBB2
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SEP-AAAAAAAAAAAAAA22 -s 10.244.0.2/32 -m comment --comment "kube-system/dns:tcp" -j KUBE-MARK-MASQ
-A KUBE-SEP-AAAAAAAAAAAAAA22 -p tcp -m comment --comment "kube-system/dns:tcp" -m recent --set --name KUBE-SEP-AAAAAAAAAAAAAA22 --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination 10.244.0.2:53
-A KUBE-SEP-AAAAAAAAAAAAAA33 -s 10.244.0.3/32 -m comment --comment "kube-system/dns:tcp" -j KUBE-MARK-MASQ
-A KUBE-SEP-AAAAAAAAAAAAAA33 -p tcp -m comment --comment "kube-system/dns:tcp" -m recent --set --name KUBE-SEP-AAAAAAAAAAAAAA33 --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination 10.244.0.3:53
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "kube-system/dns:tcp cluster IP" -m tcp --dport 53 -j KUBE-SVC-AAAAAAAAAAAAAAA2
-A KUBE-SERVICES -d 10.96.0.20/32 -p tcp -m comment --comment "shop/web cluster IP" -m tcp --dport 80 -j KUBE-SVC-BBBBBBBBBBBBBBB2
-A KUBE-SERVICES -d 192.0.2.20/32 -p tcp -m comment --comment "shop/web loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-BBBBBBBBBBBBBBB2
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-AAAAAAAAAAAAAAA2 ! -s 10.244.0.0/16 -d 10.96.0.10/32 -p tcp -m comment --comment "kube-system/dns:tcp cluster IP" -m tcp --dport 53 -j KUBE-MARK-MASQ
-A KUBE-SVC-AAAAAAAAAAAAAAA2 -m comment --comment "kube-system/dns:tcp -> 10.244.0.2:53" -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-AAAAAAAAAAAAAA22 --mask 255.255.255.255 --rsource -j KUBE-SEP-AAAAAAAAAAAAAA22
-A KUBE-SVC-AAAAAAAAAAAAAAA2 -m comment --comment "kube-system/dns:tcp -> 10.244.0.2:53" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-AAAAAAAAAAAAAA22
-A KUBE-SVC-AAAAAAAAAAAAAAA2 -m comment --comment "kube-system/dns:tcp -> 10.244.0.3:53" -j KUBE-SEP-AAAAAAAAAAAAAA33
COMMIT
*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-EXTERNAL-SERVICES -p tcp -m comment --comment "shop/none has no endpoints" -m addrtype --dst-type LOCAL -m tcp --dport 30081 -j REJECT --reject-with icmp-port-unreachable
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web health check node port" -m tcp --dport 32000 -j ACCEPT
-A KUBE-PROXY-FIREWALL -d 192.0.2.20/32 -p tcp -m comment --comment "shop/web traffic not accepted by KUBE-FW-BBBBBBBBBBBBBBB2" -m tcp --dport 80 -j DROP
-A KUBE-SERVICES -d 10.96.0.30/32 -p tcp -m comment --comment "shop/none has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
COMMIT
`

// ipvsSets and ipvsMode are what it writes in mode ipvs, virtual servers aside.
const ipvsSets = `create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOOP-BACK hash:ip,port,ip family inet hashsize 1024 maxelem 65536
create KUBE-NODE-PORT-TCP bitmap:port range 0-65535
create KUBE-6-CLUSTER-IP hash:ip,port family inet6 hashsize 1024 maxelem 65536
create KUBE-IPVS-IPS hash:ip family inet hashsize 1024 maxelem 65536
create KUBE-MINE hash:ip family inet hashsize 1024 maxelem 65536
add KUBE-CLUSTER-IP 10.96.0.10,tcp:53
add KUBE-CLUSTER-IP 10.96.0.20,tcp:80
add KUBE-LOOP-BACK 10.244.0.2,tcp:53,10.244.0.2
add KUBE-NODE-PORT-TCP 30080
add KUBE-6-CLUSTER-IP fd00:96::10,tcp:53
add KUBE-IPVS-IPS 10.96.0.10
add KUBE-MINE 192.0.2.1
`

const ipvsMode = `*nat
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port for masquerade purpose" -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-SERVICES -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set KUBE-CLUSTER-IP src,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
-A INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-A INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-A FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT --reject-with icmp-port-unreachable
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
COMMIT
`

// formerVersions lists what kube-proxies up to 1.9 and the former userspace mode
// had in built-in chains.
const formerVersions = `*nat
:KUBE-NODEPORT-CONTAINER - [0:0]
:KUBE-NODEPORT-HOST - [0:0]
:KUBE-PORTALS-CONTAINER - [0:0]
:KUBE-PORTALS-HOST - [0:0]
-A PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-CONTAINER
-A PREROUTING -m addrtype --dst-type LOCAL -m comment --comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-CONTAINER
-A OUTPUT -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-HOST
-A OUTPUT -m addrtype --dst-type LOCAL -m comment --comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-HOST
COMMIT
*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORT-NON-LOCAL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m comment --comment "Ensure that non-local NodePort traffic can flow" -j KUBE-NODEPORT-NON-LOCAL
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A INPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m comment --comment "kubernetes forward rules" -j KUBE-FORWARD
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
COMMIT
`

// nftablesMode is a little of what it writes in mode nftables, and a table of
// somebody else's.
const nftablesMode = `
add table ip kube-proxy
add chain ip kube-proxy services
add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add rule ip kube-proxy nat-prerouting jump services
add rule ip kube-proxy services ip daddr . meta l4proto . th dport vmap @service-ips
add table ip6 kube-proxy
add chain ip6 kube-proxy services
`
const foreignTables = `
add table inet kube-proxy
add table ip mine
add chain ip mine kube-proxy
`
