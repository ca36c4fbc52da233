# Sourced by test/run.sh and test/vm/tests.sh: the end-to-end tests that are the same in every mode. Mode iptables runs them natively.
# Manifests, commands and settings,
same="NothingArrives|Commands.*|ConfigurationFile|WrongUse|NobodyRuns|MalformedManifest|BrokenFromTheStart|DuplicateDefinition"
same+="|TwoServicesOnOneAddress|WrongAnnotation|DirectoryComesBack|ManifestsThatAreLate|WatchStatus|WatchLeavesTheTerminal|Lab.*|SkippedFaultIsMended"
same+="|CompareInterrupted|CompareNeedsRoot|TraceCommand|ConntrackSettings"
# userspace,
same+="|UserspaceRetries|ProxyProtocol|StreamsAreWhole|ClientThatSendsNothing|IdleSessionsEnd"
same+="|LeastConnectionsInUserspace|FewDescriptors|SilentEndpoint|UDPEndpointThatRefuses"
# what passive health makes of the evidence, wherever that is from,
same+="|DeadNode|ManyEndpointsOfADeadNode|SlowEndpoints|LogTaken"
# the process itself, its pins, its files and its metrics,
same+="|PortInUse|SecondKproxy|StoppedWhileStarting|ReadyMeansReady|PinsSurviveARestart|Disk|Drain|ServiceManagerIsNotified|WhatTheHostLacks"
same+="|CrashesKeepStreamsWhole|SupervisorFaults|TakeoverWithTooFewDescriptors|TakeoverFromOneThatHasOnlyBegun|ScrapesOfManyServices|MetricsWithinLimits|MetricsAreInOrder"
# stops and takeovers of a kproxy in a mode that the test names,
same+="|StopInModeUserspace|RestartInModeUserspace|StopDuringTakeover|StopWithoutEnd|TakeoverInModeUserspace|TakeoverThatFails|TakeoverInAnotherMode|TakeoverInAPod"
same+="|TwoNewcomers|NewcomerKilledAtEveryStep|KilledAtEveryStepOfATakeover"
# and another variant of iptables.
same+="|LegacyVariant"
