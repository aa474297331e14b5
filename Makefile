# Every target builds what it needs, from a fresh clone on. `make help` lists them.
# PYTHON, an interpreter, and SET, pinned versions, are requirements/install.sh's to choose.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NEMO2 := .venv-nemo2
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PYTEST := $(BIN)/python -m pytest
ENGINE ?= podman
UV := 0.13.9
RL_BIN := .venv-nemo-rl/bin
RL_READY := .venv-nemo-rl/.ready
RL_WORKER := .venv-nemo-rl-worker
RL_PIP := $(RL_BIN)/python -m pip --disable-pip-version-check install --quiet
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

.PHONY: help venv demo lint lanes bench docs hashes sbom test-second test-matrix
.PHONY: test test-fuzz test-kills test-slow test-layouts test-architectures test-rehearsal test-swap-in
.PHONY: test-megatron-lm test-nemo2 test-slurm test-nemo-rl test-nemo-rl-worker test-gpu gpu-kit
.PHONY: test-images image image-cpu
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-19s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(READY) ## build .venv: all that tests and demo need; PYTHON=<3.11, 3.12 or 3.13>

$(READY): $(wildcard requirements/* requirements/hashed/*) pyproject.toml
	@PYTHON="$(PYTHON)" SET="$(SET)" requirements/install.sh $(VENV) requirements/dev.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY) ## run the toy recipe: prepare, train, evaluate and report, without a GPU
	$(BIN)/nemo-rod run recipe=toy

test: $(READY) ## run the fast tests; ARGS="-k name" is handed to pytest
	$(PYTEST) $(ARGS)

# Whatever touches NVIDIA's functions: signatures, refusals, and every kind of job in one process.
SECOND := $(addprefix tests/,project/test_upstream.py megatron/test_forward_only.py \
  megatron/test_identity.py megatron/test_layouts.py \
  plan/test_shapes.py evaluation/test_merging_architectures.py swap_in/test_units.py \
  swap_in/test_refusals.py commands/test_cli.py)

test-second: ## run a fast subset on the second set, Megatron-Bridge 0.3, in .venv-bridge-0.3
	@$(MAKE) --no-print-directory VENV=.venv-bridge-0.3 SET=bridge-0.3 ARGS="$(SECOND) $(ARGS)" test

test-matrix: ## main job, layouts, resume, export and swap-in on every pair of versions; hours
	python3 tests/matrix.py $(ARGS)

test-fuzz: $(READY) ## give every reader damaged files and every command random words; ten minutes
	$(PYTEST) -m fuzz --timeout 1200 -s $(ARGS)

test-kills: $(READY) ## kill every stage again and again under a real Slurm; about an hour
	$(PYTEST) -m kills --timeout 14400 -s $(ARGS)

test-slow: $(READY) ## run the tests that take minutes
	$(PYTEST) -m slow --timeout 1800 $(ARGS)

test-layouts: $(READY) ## train and score in many parallel layouts on gloo
	$(PYTEST) -m layouts --timeout 900 $(ARGS)

test-architectures: $(READY) ## load, score, train and export Qwen3.5 and Nemotron-H in many layouts
	$(PYTEST) -m architectures --timeout 3600 $(ARGS)

test-rehearsal: $(READY) ## rehearse every setting of the paper, with all of its arms, on CPU
	$(PYTEST) -m rehearsal --timeout 3600 $(ARGS)

test-swap-in: $(READY) ## swap the selector into a job of Megatron-Bridge, in several layouts
	$(PYTEST) -m swap_in --timeout 1800 $(ARGS)

test-megatron-lm: $(READY) ## the same in pretrain_gpt.py of MEGATRON_LM=<checkout of core_v0.16.1, core_v0.19.0 or main>
	@test -f "$(MEGATRON_LM)/pretrain_gpt.py" || { echo "MEGATRON_LM=$(MEGATRON_LM) is no Megatron-LM checkout: make test-megatron-lm MEGATRON_LM=<checkout of core_v0.16.1, core_v0.19.0 or main>"; exit 1; }
	MEGATRON_LM=$(abspath $(MEGATRON_LM)) $(PYTEST) -m megatron_lm --timeout 3600 $(ARGS)

test-nemo2: $(NEMO2)/.ready ## the same in llm.pretrain of NeMo 2.x; builds an environment of its own
	$(NEMO2)/bin/python -m pytest tests/hosts/test_nemo2.py -m nemo2 --timeout 3600 $(ARGS)

$(NEMO2)/.ready: requirements/torch.txt requirements/nemo2.txt pyproject.toml
	@test -x $(NEMO2)/bin/python || $(or $(PYTHON),python3.11) -m venv $(NEMO2)
	@echo "Installing torch and NeMo 2.x into $(NEMO2) (3 GB, some minutes)"
	@$(NEMO2)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/torch.txt
	@$(NEMO2)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r requirements/hashed/nemo2.txt
	@$(NEMO2)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

test-slurm: $(READY) ## run a recipe on a real Slurm of two nodes, started on loopback for the test
	$(PYTEST) -m slurm --timeout 7200 -s $(ARGS)

test-images: $(READY) ## build both container images with buildah, and run a recipe in each
	$(PYTEST) -m images --timeout 7200 -s $(ARGS)

# ENGINE is docker, podman or buildah; BUILD="--build-arg BASE_IMAGE=..." is handed to its build.
image: ## build the container image nemo-rod:gpu, a thin layer over NVIDIA's (docs/images.md)
	$(ENGINE) build -f docker/Dockerfile -t nemo-rod:gpu $(BUILD) .

image-cpu: ## build the container image nemo-rod:cpu, for machines without a GPU
	$(ENGINE) build -f docker/Dockerfile.cpu -t nemo-rod:cpu $(BUILD) .

# An environment of its own: Ray and what NeMo-RL imports are nobody else's business.
$(RL_READY): $(wildcard requirements/*) pyproject.toml
	@PYTHON="$(PYTHON)" SET=bridge-0.3 requirements/install.sh .venv-nemo-rl requirements/dev.txt requirements/nemo-rl.txt
	@$(RL_PIP) --no-deps --no-build-isolation --editable .
	@touch $@

test-nemo-rl: ## run RoD on NeMo-RL without a GPU; NEMO_RL=<a checkout, v0.6.0 or later>
	@test -d "$(NEMO_RL)/nemo_rl" || { echo "NEMO_RL='$(NEMO_RL)' is no checkout of NeMo-RL: make test-nemo-rl NEMO_RL=<folder>"; exit 2; }
	@$(MAKE) --no-print-directory $(RL_READY)
	NEMO_RL=$(abspath $(NEMO_RL)) $(RL_BIN)/python -m pytest -m nemo_rl -o timeout=3000 $(ARGS)

# With the Megatron that NeMo-RL pins, which a recursive clone has; its transformers is TRANSFORMERS.
# That Megatron compiles its helpers with whatever python3 is first on the path.
test-nemo-rl-worker: TRANSFORMERS := $(or $(TRANSFORMERS),5.8.1)
test-nemo-rl-worker: ## run NeMo-RL's own Megatron worker; NEMO_RL=<a recursive clone>
	@test -d "$(NEMO_RL)/nemo_rl" || { echo "NEMO_RL='$(NEMO_RL)' is no checkout of NeMo-RL: make test-nemo-rl-worker NEMO_RL=<folder>"; exit 2; }
	@SET=bridge-0.6 requirements/install.sh $(RL_WORKER) requirements/dev.txt requirements/nemo-rl.txt
	@$(RL_WORKER)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/nemo-rl-worker.txt transformers==$(TRANSFORMERS)
	third=$(abspath $(NEMO_RL))/3rdparty; bridge=$$third/Megatron-Bridge-workspace/Megatron-Bridge; \
	core=$$third/Megatron-LM-workspace/Megatron-LM; test -d $$core/megatron || core=$$bridge/3rdparty/Megatron-LM; \
	PATH=$(abspath $(RL_WORKER))/bin:$$PATH PYTHONPATH=$$bridge/src:$$core:$(CURDIR) NEMO_RL=$(abspath $(NEMO_RL)) \
		$(RL_WORKER)/bin/python -m pytest -m nemo_rl \
		tests/hosts/test_own_worker.py tests/hosts/test_rehearsed.py tests/hosts/test_ray_node.py -o timeout=3000 $(ARGS)

# Not in .venv, whose torch is a CPU build: an environment with CUDA belongs to its machine.
test-gpu: PYTHON := $(or $(PYTHON),python3)
test-gpu: ## run the GPU tests with the torch and Megatron of PYTHON (in a NeMo image, say)
	@$(PYTHON) -c 'import importlib.util as u, sys; u.find_spec("torch") and __import__("torch").cuda.is_available() or sys.exit("$(PYTHON) sees no GPU: run make test-gpu PYTHON=... with an environment whose torch does")'
	$(PYTHON) -m pytest -m gpu -o timeout=900 $(ARGS)

docs: $(READY) ## write the page of every configuration key: runs/docs/configuration.md
	@$(BIN)/python tests/helpers/config_page.py

# uv asks the index for the digests of every file of a pin, and downloads none of them.
hashes: $(READY) ## write requirements/hashed/, the pinned sets with the digests of their files
	@$(PIP) uv==$(UV)
	@for file in requirements/*.txt; do \
	  name=$$(basename $$file); case $$name in bridge-0.3*|nemo2.txt) minor=11 ;; *) minor=12 ;; esac; \
	  { echo "# Made of ../$$name by \`make hashes\`: every file that PyPI has of each pin."; \
	    $(BIN)/uv pip compile --quiet --no-deps --no-header --no-annotate --no-strip-extras \
	      --generate-hashes --python-version 3.$$minor $$file; } >requirements/hashed/$$name; \
	done

sbom: $(READY) ## list what .venv has, with versions and licences, in CycloneDX: runs/sbom.json
	@test -x .venv-sbom/bin/cyclonedx-py || $(BIN)/python -m venv .venv-sbom
	@.venv-sbom/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes -r requirements/hashed/sbom.txt
	@mkdir -p runs
	@.venv-sbom/bin/cyclonedx-py environment --output-reproducible --output-file runs/sbom.json $(BIN)/python
	@echo "runs/sbom.json"

# ARCHITECTURE is the GPU's compute capability, 90 for H100 and H200; TE=0 leaves TransformerEngine out.
gpu-kit: $(READY) ## pack what a GPU machine without a network needs into gpu-kit/ (docs/performance.md)
	PYTHON=$(BIN)/python benchmarks/gpu_kit/pack.sh gpu-kit

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lanes: ## say for each lane of tests at which commit it last passed
	@python3 tests/lanes.py

bench: $(READY) ## run every benchmark; the rows go to runs/benchmarks/<name>.json
	@mkdir -p runs/benchmarks
	@set -e; for file in $(BENCHMARKS); do \
	  $(BIN)/python $$file --json runs/benchmarks/$$(basename $$file .py).json; \
	done
