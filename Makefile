.DEFAULT_GOAL := help
.PHONY: help install develop demo bench test mutants soak faults cluster image kube vllm release quality docs browser prometheus

PYTHON ?= python3
BIN := .venv/bin
# Each of the many processes would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# Python compiles the modules that it imports; compiling all 18,000 at once would take most of a minute.
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile -c constraints.txt

.venv/.installed: pyproject.toml constraints.txt $(wildcard osd/runtime/native/*.[ch])
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "osd needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[serve]'
	touch $@

.venv/.developed: .venv/.installed
	$(PIP) -e '.[dev]'
	touch $@

install: .venv/.installed ## Create .venv with the packages of osd

develop: .venv/.developed ## Add the packages of the tests

demo: install ## Watch a drafter learn from live traffic; ARGS="--minutes 3 --report demo.json"
	$(BIN)/osd demo $(ARGS)

bench: install ## Measure the engine and the service in a few minutes; benchmarks/README.md has the long versions
	$(BIN)/osd bench forward --turns 7
	$(BIN)/osd bench decode --draft eagle --growth chain --synthetic-acceptance 0.6 --waves 5
	$(BIN)/osd bench recall --after 30 --prompts 8
	$(BIN)/osd bench rules --contexts 16 --temperature 1
	$(BIN)/osd bench start
	$(BIN)/osd bench serve --rate 0.5 --duration 30

# Tests that are not unit tests mostly wait for processes: two at a time fill the cores.
test: develop browser prometheus ## Run the tests; ARGS="tests/unit -k config"
	$(BIN)/python -m pytest $(or $(ARGS),tests/unit -n auto)
	$(if $(ARGS),,$(BIN)/python -m pytest tests/e2e tests/integration tests/faults -n 2 --dist loadfile)

mutants: develop ## Plant small faults in a package and show the faults that no test notices; PATHS=osd/registry SAMPLE=40 SEED=0
	$(BIN)/python -m tests.mutants --sample $(or $(SAMPLE),40) --seed $(or $(SEED),0) $(or $(PATHS),$(error PATHS is not set: make mutants PATHS=osd/registry))

soak: develop ## Run the slow tests: output laws over a hundred thousand runs, whole services, and external load generators
	$(BIN)/python -m pytest -m 'soak and not fault' -n auto $(ARGS)

faults: develop ## Break the processes, connections and disks of a service, and print promises and results
	$(BIN)/python -m pytest -m 'fault and not cluster and not vllm' -n 2 --dist loadfile $(ARGS)

cluster: develop ## Run the service on machines made of namespaces, cut and remove some, and print the results; needs root
	$(BIN)/python -m pytest -m 'cluster and not soak' tests/cluster -rs --durations=0 --durations-min=1 $(ARGS)

image: develop ## Build the images, run the image for CPUs without rights, chat and stop it, and print the results
	$(BIN)/python -m pytest -m image tests/image -v -rsP --durations=0 --durations-min=1 $(ARGS)

kube: develop ## Check the manifests for Kubernetes and run their pods on machines made of namespaces; CRD=FILE of KubeRay
	OSD_TEST_CRD=$(CRD) $(BIN)/python -m pytest -m kube tests/kube -v -rs --durations=0 --durations-min=1 $(ARGS)

release: develop ## Build source archive, wheel and bill of materials into dist/, and check versions and changelog
	$(BIN)/python -m tests.release

vllm: develop ## Test capture inside real vLLM processes, then our drafters there; ARGS="--stream FILE --draft recall"
	$(BIN)/python -m pytest -m vllm tests/vllm
	$(BIN)/osd bench vllm $(ARGS)

quality: develop ## Run every check that is not a test of behaviour
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit/cli/test_commands.py -k help

# An environment of its own, because the service needs no package of it.
.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --disable-pip-version-check --no-compile -c constraints.txt $$(.venv-docs/bin/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# The second command fails if a page loads anything from another host.
docs: .venv-docs/.installed ## Build the documentation as a website into site/
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	! grep -rnoE '<(script|link|img|iframe)[^>]* (src|href)=.?(https?:)?//[^ >]*' site --include=*.html

# The dashboard's tests need a browser. It is installed if that needs no password; otherwise a message names it.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  if ! command -v apt-get >/dev/null; then sudo=; elif [ "$$(id -u)" = 0 ]; then sudo=env; \
	  elif sudo -n true 2>/dev/null; then sudo='sudo -n'; else sudo=; fi; \
	  if [ -n "$$sudo" ]; then $$sudo apt-get update -q && $$sudo apt-get install -y -q --no-install-recommends chromium; \
	  else echo "The browser tests need chromium: install your system's package of that name."; fi; }

# Unpacked instead of installed, because Debian's package starts a server.
prometheus: develop
	@command -v promtool >/dev/null || test -x .venv/prometheus/usr/bin/promtool || { \
	  mkdir -p .venv/prometheus && cd .venv/prometheus && apt-get download -q prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb \
	  || echo "The tests of alerts need prometheus and promtool: put them on the PATH."; }
