# Sourced by test/run.sh and test/vm/tests.sh: the end-to-end tests whose subject is a data plane of the kernel, what its rules do to
# packets and how services move to it and back. All end-to-end tests run in mode nftables, these in modes iptables and ipvs too, and
# so do those whose name begins with a data plane's.
# What the matrix promises,
planes="Flows|TraceFlows|AnotherProxy|UnservedIsRefused|InvalidPackets|ServiceAtHostAddress|NodePortAtEveryAddress|TargetPortsDiffer"
planes+="|HostPortsStayPrivate|EndpointAtItsOwnNodePort"
# moves, drains and affinity,
planes+="|OffloadByItself|TwentyCyclesAndAKill|HangIsNoOutage|RestartIsHitless|AffinityAcrossMoves|WhatTheKernelCantDoStays|ServiceIsEdited"
planes+="|DeletedService|DepartedEndpoints|RollingUpdate|SharesAreExact|ForgottenConnectionsGoOn|FlowsThatBeganWithoutRules"
# UDP,
planes+="|UDPFlowsFollowChanges|UDPMovesBetweenDataPlanes|DeadEndpointOfUDP"
# damage, clean-up, and what a dead endpoint and a takeover are to it,
planes+="|DamageIsRepaired|CleanupLeavesWhatIsForeign|KernelRefusalCostsNoRequest|DeadEndpoint|Takeover"
# and what is told of it.
planes+="|TraceNamesFaults|MetricsOfTheKernel|RefusedClientsAreListed|Bugreport"
# Of what trace says, this is the same in every mode: ways of telling pods from others, masquerading and pods' links, and what stops
# a packet before a service's own way begins or after it.
same="^TestTraceFlows\$/./^(by-.*|on-bridge|detector-and-all|masquerade-all|unnumbered|bridged)\$"
same+="|^TestTraceNamesFaults\$/./^(no_route_at_all|the_endpoint.s_(route_is_missing|link|neighbour|address)|the_link.s_other|the_client.s_neighbour|IPv6:_the_endpoint.s|UDP:_the_endpoint.s_firewall_drops)"
same+="|^TestTraceNamesFaults\$/./^(a_mesh|the_client.s_firewall|the_client_has_no|DNAT_to|redirect_to|TPROXY|a_rule_drops_in_raw|the_endpoint.s_route_is_(unreachable|prohibited)|strict_reverse"
same+="|the_endpoint.s_(firewall_(resets|drops_answers|drops_later|admits)|gateway|strict)|the_endpoint_(has|answers)|ARP_is_off|the_client_drops)"
