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
planes+="|TraceNamesFaults|MetricsOfTheKernel|RefusedClientsAreListed"
