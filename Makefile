# The targets people type. What they do is in test/setup.sh and test/run.sh.

export PATH := $(PATH):/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)

.PHONY: help build demo test bench golden-update clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## bin/kproxy
	@test/setup.sh build
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '$(LDFLAGS)' -o bin/kproxy ./cmd/kproxy

demo: ## set all up, build, and show kproxy at work on real packets (as root, about a minute)
	@[ "$$(id -u)" = 0 ] || { echo "make demo builds a network of namespaces, which needs root: sudo make demo" >&2; exit 3; }
	@test/setup.sh run
	@$(MAKE) --no-print-directory build
	bin/kproxy lab demo

test: ## set all up and run every check and test (as root: also those with real packets)
	@test/setup.sh test
	@$(MAKE) --no-print-directory build
	@test/run.sh

bench: ## benchmarks, ten times each, for benchstat
	@test/setup.sh build
	go test -buildvcs=false -run '^$$' -bench . -benchmem -count 10 -p 1 -timeout 60m ./...

golden-update: ## rewrite the goldens; read the difference before you commit it
	@test/setup.sh build
	go test -buildvcs=false ./test/golden -update
	git diff --stat -- test/golden

clean: ## remove what was built
	rm -rf bin dist
