# `make demo` and `make test` are the two to know; `make` alone lists the rest.
#
# Each target makes or reuses the virtual environment `.venv` and installs what it needs; a stamp file remembers that,
# until settings.ini, constraints.txt or the packaging changes.

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
NB     ?=
GPU    ?=
PEERS  ?=
LONG   ?= tests/long

BIN  := $(VENV)/bin
PY   := $(BIN)/python
INST := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEPS := settings.ini constraints.txt setup.py pyproject.toml tools/venv.py
RUN  := $(VENV)/.installed-run
DEV  := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test long check aot gpu peers docs preview lab export exec clean-nbs readme sidebar prepare wheel release clean

help:
	@echo 'make demo       answer three prompts with the default model: the engine at work'
	@echo 'make test       everything CI checks: sync, site, notebooks, kernels, tests'
	@echo 'make docs       build the website into _docs/'
	@echo 'make preview    build it, serve it on http://127.0.0.1:$(PORT)/ (PORT=… changes that); warns where docs fails'
	@echo 'make lab        open the notebooks in JupyterLab'
	@echo ''
	@echo 'make export     write pagedlm/*.py from the notebooks'
	@echo 'make exec       run the notebooks and store their outputs (NB=nbs/00_core.ipynb for one)'
	@echo 'make clean-nbs  remove execution counts and other noise from the notebooks'
	@echo 'make readme     write README.md and CHANGELOG.md from their notebooks'
	@echo 'make sidebar    write the sidebar of _quarto.yml from the notebooks'
	@echo 'make prepare    export, exec, readme, sidebar, check: before a commit'
	@echo 'make check      are modules, notebooks, README.md and sidebar in step?'
	@echo 'make aot        compile every kernel in every configuration for five kinds of GPU: 15 minutes, without any'
	@echo 'make long       the tests that take minutes: load, soak, full sweeps (LONG=tests/long/test_X.py for one file)'
	@echo 'make gpu        check and measure everything on the GPU of this machine: 5 minutes (GPU=--dry: on any CPU)'
	@echo 'make peers      compare with other engines on this CPU, in turns: half an hour (PEERS=list: who is installed)'
	@echo 'make wheel      build the wheel into dist/ and try it away from the repository'
	@echo 'make release    prepare sdist and wheel of the last commit, tried in empty environments; uploads nothing'
	@echo 'make clean      remove what the targets above built; the environment stays'

# ---- the environment

$(RUN): $(DEPS)
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here. Name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) tools/venv.py $(VENV)
	@echo "Installing pagedlm and what it runs on into $(VENV): minutes the first time (torch is large)."
	@$(INST) -e .
	@touch $@

$(DEV): $(RUN)
	@echo "Installing what the notebooks, tests and site need into $(VENV)."
	@$(INST) -e '.[dev]'
	@touch $@

# ---- use

demo: $(RUN)
	@$(BIN)/pagedlm demo

lab: $(DEV)
	@$(PY) -m jupyter trust nbs/*.ipynb >/dev/null # JupyterLab does not show figures of notebooks it does not trust
	@$(PY) -m jupyterlab --notebook-dir=nbs $$([ "$$(id -u)" != 0 ] || echo --allow-root) # root: in a container

# ---- checks

test: $(DEV)
	@$(PY) tools/test.py $(STEPS)

check: $(DEV)
	@$(PY) tools/check.py

long: $(DEV)
	@$(PY) -m pytest -q -s $(LONG)

aot: $(DEV)
	@$(PY) tools/aot_check.py --all

gpu: $(RUN)
	@$(PY) tools/gpu_check.py $(GPU)

peers: $(DEV)
	@$(PY) tools/peers.py $(PEERS)

wheel: $(DEV)
	@$(PY) tools/package.py

release: $(DEV)
	@$(PY) tools/release.py

# ---- notebooks

export: $(DEV)
	@$(BIN)/nbdev_export

exec: export
	@$(PY) tools/nbexec.py $(if $(NB),--fname $(NB))

clean-nbs: $(DEV)
	@$(BIN)/nbdev_clean

readme: $(DEV)
	@$(PY) tools/docs.py readme

sidebar: $(DEV)
	@$(PY) tools/docs.py sidebar

prepare: exec
	@$(PY) tools/docs.py sidebar
	@$(PY) tools/docs.py readme
	@$(PY) tools/check.py

# ---- the site

docs: $(DEV)
	@$(PY) tools/docs.py site

preview: $(DEV)
	@$(PY) tools/docs.py site --draft
	@echo "Serving _docs on http://127.0.0.1:$(PORT)/ (Ctrl-C stops it)"
	@$(PY) -m http.server --bind 127.0.0.1 --directory _docs $(PORT)

clean:
	rm -rf _docs _proc build dist .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
