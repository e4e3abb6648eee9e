# The entry point for users, CI and pre-commit. `make demo` and `make test` need only Python 3.11 or later and make.

.DEFAULT_GOAL := help

# The first interpreter of at least 3.11; `make PYTHON=/path/to/python ...` selects another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# The torch to install if the environment has none; `make TORCH=torch==2.12.0 ...` selects another.
TORCH ?= torch==2.13.0
DEEPSPEED ?= deepspeed==0.19.8
VENV ?= .venv
CLIENTS_VENV ?= .venv-clients
CLIENTS_4_VENV ?= .venv-clients-4
# The tag of the example scripts of diffusers: at most the version in tests/clients/requirements.txt.
DIFFUSERS_EXAMPLES ?= v0.40.0
DIFFUSERS_SOURCE ?= https://github.com/huggingface/diffusers
FRAMEWORKS_VENV ?= .venv-frameworks
PEER_VENV ?= .venv-peer
PEER ?= accelerate==1.15.0
TRACKERS_VENV ?= .venv-trackers
SAGEMAKER_VENV ?= .venv-sagemaker
SAGEMAKER_2_VENV ?= .venv-sagemaker-2
INSTALL_VENV ?= .venv-install
MOTO ?= moto[iam,s3,sagemaker,sts]==5.2.5
DOCS_VENV ?= .venv-docs
DOCS_PORT ?= 8000
# For two cores: many tests wait for processes that they have started.
WORKERS ?= 3
PYTEST_ARGS ?=
# What `make install` installs of the package's optional dependencies. CI adds `engines`, which saves a second pip.
EXTRAS ?= test,examples,text
# The tests start hundreds of interpreters. Without bytecode each of them compiles torch, which takes seconds.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# Python compiles what it imports; compiling all files of all packages takes more than a minute.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
ENGINES_STAMP := $(VENV)/.installed-engines
# The engine programs that the tests run, and the Debian packages that provide them.
ENGINE_PROGRAMS := mpirun.openmpi mpirun.mpich munged slurmctld slurmd sbatch ip pdsh
ENGINE_PACKAGES := openmpi-bin mpich munge slurmctld slurmd slurm-client iproute2 pdsh
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
CLIENTS_4_STAMP := $(CLIENTS_4_VENV)/.installed
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed
PEER_STAMP := $(PEER_VENV)/.installed
TRACKERS_STAMP := $(TRACKERS_VENV)/.installed
SAGEMAKER_STAMP := $(SAGEMAKER_VENV)/.installed
SAGEMAKER_2_STAMP := $(SAGEMAKER_2_VENV)/.installed
EXAMPLES_STAMP := $(CLIENTS_VENV)/diffusers-$(DIFFUSERS_EXAMPLES)
INSTALL_STAMP := $(INSTALL_VENV)/.installed
DOCS_STAMP := $(DOCS_VENV)/.installed
# The peer without its dependencies, to run the clients with it in their own environment.
PEER_PACKAGE := $(CLIENTS_VENV)/peer

.PHONY: help install install-engines engine-programs demo test test-torch test-all test-engines test-faults test-clients test-device test-frameworks test-trackers test-sagemaker \
	screenshots test-install check \
	check-style check-types check-names check-budgets check-subjects format bench bench-plan bench-clients gpu-check docs docs-serve clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

install: $(STAMP)  ## create .venv with this package (editable) and everything that its tests need

demo: $(DEMO_STAMP)  ## train a small GPT on two processes, kill it, and resume it (a minute on two cores)
	@echo "The demo takes about a minute on two CPU cores."
	@PATH="$(abspath $(BIN)):$$PATH" python examples/demo.py

# A worker takes neighbouring tests, so that most fixtures of a module and imports of a rank server are made once.
test: $(STAMP)  ## run the tests of CI without those of engines (PYTEST_ARGS is passed to pytest)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not engines and not thorough and not device" $(PYTEST_ARGS)

# An environment for each torch: make test-torch TORCH=torch==2.14.1
test-torch:  ## run the tests of CI on another torch, TORCH=torch==2.14.1, in an environment of its own
	$(MAKE) test VENV=.venv-$(subst =,,$(TORCH)) TORCH="$(TORCH)"

test-all: $(STAMP)  ## run all tests: also those that repeat others with more settings, and those of installed engines
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-engines: $(ENGINES_STAMP)  ## run scripts through Open MPI, MPICH, Slurm, Ray and others; install missing ones (Debian, root)
	ENGINES_REQUIRED=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist tests/engines $(PYTEST_ARGS)

test-faults: $(STAMP)  ## kill runs at a hundred random moments, and test all other checkpoint failures
	KILLS=100 EXITS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist --timeout 3600 tests/faults tests/checkpointing \
		tests/distributed/test_exit.py tests/distributed/test_checkpoint.py tests/distributed/test_checkpoint_faults.py

# The tests run with the clients' newest versions, and those of transformers' Trainer with version 4 too.
test-clients: $(CLIENTS_STAMP) $(CLIENTS_4_STAMP) $(EXAMPLES_STAMP)  ## run transformers, peft, trl, diffusers and others on this package
	OMP_NUM_THREADS=1 $(CLIENTS_VENV)/bin/python -m pytest -p no:xdist tests/clients tests/examples/test_recipes.py \
		tests/commands/test_init.py $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(CLIENTS_4_VENV)/bin/python -m pytest -p no:xdist tests/clients/test_trainer.py \
		tests/clients/test_trainer_layouts.py tests/clients/test_pretrained.py $(PYTEST_ARGS)

test-device: $(STAMP)  ## run on simulated devices, one to four of them (builds an extension of torch with g++)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist tests/device $(PYTEST_ARGS)

test-frameworks: $(FRAMEWORKS_STAMP)  ## run Keras, JAX and tf.data on this package (1.7 GB of packages)
	OMP_NUM_THREADS=1 $(FRAMEWORKS_VENV)/bin/python -m pytest -p no:xdist tests/clients/test_frameworks.py $(PYTEST_ARGS)

test-trackers: $(TRACKERS_STAMP)  ## log through every tracker's real package, offline, and read it back; launch from a Jupyter kernel
	TRACKERS_REQUIRED=1 OMP_NUM_THREADS=1 $(TRACKERS_VENV)/bin/python -m pytest -p no:xdist tests/tracking \
		tests/launchers/test_notebook.py $(PYTEST_ARGS)

# Both versions of the client, with moto in place of Amazon's services.
test-sagemaker: $(SAGEMAKER_STAMP) $(SAGEMAKER_2_STAMP)  ## start jobs with SageMaker's client, versions 3 and 2, against a simulated account
	SAGEMAKER_REQUIRED=1 OMP_NUM_THREADS=1 $(SAGEMAKER_VENV)/bin/python -m pytest -p no:xdist tests/launchers/test_sagemaker_clients.py $(PYTEST_ARGS)
	SAGEMAKER_REQUIRED=1 OMP_NUM_THREADS=1 $(SAGEMAKER_2_VENV)/bin/python -m pytest -p no:xdist tests/launchers/test_sagemaker_clients.py $(PYTEST_ARGS)

screenshots: docs  ## add pictures of all pages of the site, and of the monitor's tests (needs Chromium)
	SCREENSHOTS=$(CURDIR)/build/screenshots $(BIN)/python -m pytest -p no:xdist tests/monitor/test_browser.py
	$(DOCS_VENV)/bin/python tools/screenshots.py build/screenshots --all

test-install: $(INSTALL_STAMP)  ## install the wheel and its clients in fresh environments; needs the package index
	INSTALL_TESTS=1 OMP_NUM_THREADS=1 $(INSTALL_VENV)/bin/python -m pytest -p no:xdist tests/packaging $(PYTEST_ARGS)

check: check-style check-types check-names check-budgets check-subjects  ## check lint, format, types, layers, public names and sizes

check-style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types: $(STAMP)
	$(BIN)/mypy --num-workers 2

check-names: $(STAMP)  # the import layers too
	$(BIN)/python -m pytest -q -p no:xdist tests/test_public_api.py tests/test_imports.py

check-budgets: $(STAMP)  # the size of the source, and its uses of private names of other libraries
	$(BIN)/python tools/budgets.py

check-subjects: $(STAMP)
	$(BIN)/python tools/subjects.py

format: $(STAMP)  ## apply automatic lint fixes and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) $(PEER_STAMP)  ## compare this package, Hugging Face's accelerate and raw PyTorch
	$(BIN)/python benchmarks/run.py --peer $(PEER_VENV)/bin/python
	$(BIN)/python tools/comparison.py

bench-plan: $(STAMP)  ## compare the estimates of `accelerate plan` with real runs on the CPU (half an hour on two cores)
	$(BIN)/python benchmarks/plan.py

bench-clients: $(CLIENTS_STAMP)  ## compare the clients' time and memory on this package and on its peer
	test -d $(PEER_PACKAGE) || $(CLIENTS_VENV)/bin/python -m pip install --quiet --no-deps --target $(PEER_PACKAGE) "$(PEER)"
	$(CLIENTS_VENV)/bin/python benchmarks/clients.py --peer $(PEER_PACKAGE)

gpu-check: $(STAMP)  ## run the checks that need a GPU; succeeds without one
	$(BIN)/python benchmarks/gpu_check.py $(if $(wildcard $(PEER_STAMP)),--peer $(PEER_VENV)/bin/python)

# A page that is absent, or a link that leads nowhere, is an error. All pages are written (-a): the search of pages that
# sphinx 9.0 has not written again lacks their entries of the index. The pages of sources have no place for new links.
docs: $(DOCS_STAMP)  ## build the site in build/site; with Chromium, test it and write pictures to build/screenshots
	$(DOCS_VENV)/bin/python tools/reference.py --api
	rm -rf build/site/_modules
	$(DOCS_VENV)/bin/python -m sphinx -q -a -W --keep-going -c docs -d build/site-cache . build/site
	SITE=build/site $(DOCS_VENV)/bin/python -m pytest -q --noconftest tests/test_site.py
	$(DOCS_VENV)/bin/python tools/screenshots.py build/screenshots

docs-serve: docs  ## serve the site at localhost (DOCS_PORT, 8000)
	$(DOCS_VENV)/bin/python -m http.server --bind 127.0.0.1 --directory build/site $(DOCS_PORT)

clean:  ## remove the environments and all generated files
	rm -rf $(VENV) $(PEER_VENV) $(CLIENTS_VENV) $(CLIENTS_4_VENV) $(FRAMEWORKS_VENV) $(TRACKERS_VENV) $(INSTALL_VENV) $(DOCS_VENV)
	rm -rf $(SAGEMAKER_VENV) $(SAGEMAKER_2_VENV)
	rm -rf build dist src/*.egg-info runs outputs docs/reference/api
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define make_venv
@test -n "$(PYTHON)" || { echo "Python 3.11 or later is required; pass its path: make PYTHON=/path/to/python" >&2; exit 1; }
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endef

# Only this package and what it requires. A complete environment has all of it.
$(DEMO_STAMP): pyproject.toml
	$(call make_venv)
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "Downloading $(TORCH) into $(VENV): about 3 GB with CUDA on Linux, 0.2 GB elsewhere. The demo itself then takes a minute."; \
		echo "Without CUDA it is 0.2 GB: make demo PIP_INDEX=URL, with the URL of the CPU builds from the install page of PyTorch."; \
		$(PIP_INSTALL) $(addprefix --index-url ,$(PIP_INDEX)) "$(TORCH)"; }
	@echo "Installing this package with numpy, safetensors, psutil, packaging, PyYAML and rich: about 25 MB."
	@$(PIP_INSTALL) --editable .
	@touch $@

$(STAMP): pyproject.toml
	$(call make_venv)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL) --editable ".[$(EXTRAS)]"
	# The build imports torch. Without operators it needs no compiler. The dependencies are in [test].
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation --no-deps "$(DEEPSPEED)"
	touch $@

install-engines: $(ENGINES_STAMP)  ## install what only the tests of engines need (Debian, as root)

engine-programs:
	@absent=$$(for p in $(ENGINE_PROGRAMS); do PATH="$$PATH:/usr/sbin:/sbin" command -v $$p >/dev/null || echo $$p; done); \
	test -z "$$absent" || { \
		{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null; } \
			|| { echo "not installed:" $$absent "- on Debian, as root: apt-get install $(ENGINE_PACKAGES)" >&2; exit 1; }; \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(ENGINE_PACKAGES) >/dev/null; \
	}

$(ENGINES_STAMP): $(STAMP) | engine-programs
	$(BIN)/python -c 'from importlib.util import find_spec; exit(not all(map(find_spec, ("ray", "kubernetes_validate"))))' \
		|| $(PIP_INSTALL) --editable ".[engines]"
	touch $@

# Environments of pinned clients, which take torch and all else from $(VENV). This package is installed first: the
# clients require accelerate, and find it.
define install_clients
test -x $(1)/bin/python || $(BIN)/python -m venv $(1)
$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	>"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
$(1)/bin/python -m pip install --quiet --no-deps --editable .
$(BIN)/python -c 'import torch; print("torch==" + torch.__version__)' >$(1)/constraints.txt
$(1)/bin/python -m pip install --quiet --constraint $(1)/constraints.txt --requirement $(2)
touch $(1)/.installed
endef

$(CLIENTS_STAMP): $(STAMP) tests/clients/requirements.txt
	$(call install_clients,$(CLIENTS_VENV),tests/clients/requirements.txt)

# Their tests are skipped without network access.
$(EXAMPLES_STAMP): | $(CLIENTS_STAMP)
	rm -rf $@.part
	{ GIT_TERMINAL_PROMPT=0 git -c advice.detachedHead=false clone --quiet --depth 1 --filter=blob:none --sparse \
			--branch $(DIFFUSERS_EXAMPLES) $(DIFFUSERS_SOURCE) $@.part \
		&& git -C $@.part sparse-checkout set examples/unconditional_image_generation examples/text_to_image examples/controlnet \
		&& mv $@.part $@; } || echo "no example scripts of diffusers: $(DIFFUSERS_SOURCE) cannot be cloned" >&2

$(CLIENTS_4_STAMP): $(STAMP) tests/clients/requirements-4.txt
	$(call install_clients,$(CLIENTS_4_VENV),tests/clients/requirements-4.txt)

$(FRAMEWORKS_STAMP): $(STAMP) tests/clients/requirements-frameworks.txt
	$(call install_clients,$(FRAMEWORKS_VENV),tests/clients/requirements-frameworks.txt)

# The peer has a separate environment, with the same torch.
$(PEER_STAMP): $(STAMP)
	test -x $(PEER_VENV)/bin/python || $(PYTHON) -m venv $(PEER_VENV)
	torch=$$($(BIN)/python -c 'import torch; print(torch.__version__.partition("+")[0])'); \
	$(PEER_VENV)/bin/python -c "import torch; assert torch.__version__.startswith('$$torch')" 2>/dev/null \
		|| $(PEER_VENV)/bin/python -m pip install --quiet "torch==$$torch"
	$(PEER_VENV)/bin/python -m pip install --quiet "$(PEER)"
	touch $@

# An environment that shares the packages of $(VENV), torch too, and this package's sources.
define shared_venv
	test -x $(1)/bin/python || $(BIN)/python -m venv $(1)
	path='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	printf '%s\n' "$$($(BIN)/python -c "$$path")" "$(CURDIR)/src" > "$$($(1)/bin/python -c "$$path")/shared.pth"
endef

# The tracker packages need other versions of some packages.
$(TRACKERS_STAMP): $(STAMP) tests/tracking/real/requirements.txt
	$(call shared_venv,$(TRACKERS_VENV))
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --requirement tests/tracking/real/requirements.txt
	touch $@

$(SAGEMAKER_STAMP): $(STAMP)
	$(call shared_venv,$(SAGEMAKER_VENV))
	$(SAGEMAKER_VENV)/bin/python -m pip install --quiet "sagemaker==3.27.0" "$(MOTO)"
	touch $@

$(SAGEMAKER_2_STAMP): $(STAMP)
	$(call shared_venv,$(SAGEMAKER_2_VENV))
	$(SAGEMAKER_2_VENV)/bin/python -m pip install --quiet "sagemaker==2.257.7" "$(MOTO)"
	touch $@

$(INSTALL_STAMP): $(STAMP)
	$(call shared_venv,$(INSTALL_VENV))
	$(INSTALL_VENV)/bin/python -m pip install --quiet --upgrade pip setuptools twine
	touch $@

$(DOCS_STAMP): $(STAMP) docs/requirements.txt
	$(call shared_venv,$(DOCS_VENV))
	$(DOCS_VENV)/bin/python -m pip install --quiet --no-compile --requirement docs/requirements.txt
	touch $@
