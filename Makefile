# `make demo` sets everything up and runs the whole story; `make test` sets up and tests.
# Another Python: make PYTHON=python3.12 VENV=.venv312 demo
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
OUT ?= runs/demo
BIN := $(VENV)/bin

.PHONY: install demo test lint clean

# Each stamp names what was installed; it is made again when the package's requirements or the pins change.
$(VENV)/.installed-%: pyproject.toml $(wildcard constraints/*.txt)
	@test -n "$(PYTHON)" || { echo "lwm needs Python 3.11 or newer; none was found on PATH (set PYTHON=/path/to/python3.x)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@version=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	pins=constraints/$$version.txt; test -f $$pins && pins="-c $$pins" || pins=""; \
	echo "installing lwm[$*] for Python $$version $$pins"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$pins -e ".[$*]"
	@touch $@

install: $(VENV)/.installed-demo,dev

demo: $(VENV)/.installed-demo
	$(BIN)/lwm demo --out $(OUT)

test: $(VENV)/.installed-demo,dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-demo,dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
