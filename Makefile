# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
RANKS ?= 4
WORKERS ?= 2
MINUTES ?= 60
MUTANTS ?= 40
BIN := .venv/bin
STAMP := .venv/.installed
QUIETLY = --quiet --disable-pip-version-check --no-compile
TWO = $(BIN)/mpirun -n 2 $(BIN)/python -m

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo "installing PyTorch, MPI and the rest into .venv: some minutes"
	$(BIN)/pip install $(QUIETLY) -c constraints.txt -e '.[mpich,test]'
	touch $@

.PHONY: install train slides tune gpt moe docs dist test test-oldest test-newest mutants fuzz soak test-gpu gpu-report lint clean
install: $(STAMP)

data/tissue: $(STAMP) examples/tissue_slides.py
	$(BIN)/python -m examples.tissue_slides --out $@

train: $(STAMP) data/tissue
	$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m mpi4dl.train --config examples/tissue.toml

data/slides/slides.csv: $(STAMP)
	$(TWO) mpi4dl.slides compose data/slides --patients 20 --slides-each 4 --size 8192

slides: $(STAMP) data/slides/slides.csv
	$(TWO) mpi4dl.train --config examples/slides.toml
	$(TWO) mpi4dl.predict runs/slides/best.safetensors --slides data/slides/slides.csv --out predicted/slides
	$(TWO) mpi4dl.slides hits predicted/slides
	$(TWO) mpi4dl.train --config examples/slides_patches.toml
	$(TWO) mpi4dl.predict runs/slides_patches/best.safetensors --slides data/slides/slides.csv --out predicted/patches
	$(TWO) mpi4dl.slides hits predicted/patches
	$(TWO) mpi4dl.embed --slides data/slides/slides.csv --mpp 1 --patch-size 64 --out features/slides \
		--model small_resnet --model-options num_filters=8,pool=max,norm=none --weights runs/slides/best.safetensors
	$(TWO) mpi4dl.train --config examples/slides_features.toml
	$(TWO) mpi4dl.predict runs/slides_features/best.safetensors --features features/slides \
		--slides-folder data/slides --out predicted/features
	$(TWO) mpi4dl.slides hits predicted/features --slides data/slides/slides.csv
	$(TWO) mpi4dl.train --config examples/slides.toml --mpp 8 --run-folder runs/slides_512
	$(BIN)/python -m examples.slides_results slides

data/nuclei: $(STAMP) examples/nuclei.py
	$(BIN)/python -m examples.nuclei --out $@

data/tune/slides.csv: $(STAMP)
	$(TWO) mpi4dl.slides compose data/tune --patients 40 --slides-each 2 --size 1536 --mpp 1 --lesion-share 0.006

tune: $(STAMP) data/nuclei data/tune/slides.csv
	$(TWO) mpi4dl.train --config examples/nuclei.toml
	$(TWO) mpi4dl.embed --slides data/tune/slides.csv --mpp 1 --patch-size 64 --out features/tune --model vit \
		--model-options image_size=64,patch=8,num_layers=2,hidden=64,num_heads=2 --mean 0.5 --std 0.25 --weights runs/nuclei
	$(TWO) mpi4dl.train --slides data/tune/slides.csv --features features/tune --aggregator max --feature-norm batch \
		--batch-size 2 --val-fraction 0.3 --replicas 2 --optimizer AdamW --lr 0.003 --epochs 20 --monitor val_loss \
		--log-interval 28 --run-folder runs/tune_frozen --resume auto
	$(TWO) mpi4dl.train --config examples/tune.toml --lora r=8,alpha=16,targets=query,value --lr 0.003 \
		--lr-of 'encoder.*=0.003' --run-folder runs/tune_lora
	$(TWO) mpi4dl.train --config examples/tune.toml
	$(TWO) mpi4dl.predict runs/tune_frozen --features features/tune --slides-folder data/tune --out predicted/tune_frozen
	$(TWO) mpi4dl.slides hits predicted/tune_frozen --slides data/tune/slides.csv
	for run in tune_lora tune_all; do \
		$(TWO) mpi4dl.predict runs/$$run --slides data/tune/slides.csv --out predicted/$$run || exit 1; \
		$(TWO) mpi4dl.slides hits predicted/$$run || exit 1; done
	$(BIN)/python -m examples.slides_results tune

gpt: $(STAMP)
	$(BIN)/mpirun -n 4 $(BIN)/python -m mpi4dl.train --config examples/gpt.toml

moe: $(STAMP)
	$(BIN)/mpirun -n 4 $(BIN)/python -m mpi4dl.train --config examples/gpt_moe.toml

docs: $(STAMP)
	$(BIN)/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/check_prose.py

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The lower bounds of setup.cfg, beside newer packages that have deprecated what they call; and the newest of all.
test-oldest:
	python3.11 -m venv .venv-oldest
	sed -n 's/^    \([A-Za-z0-9_-]*\)>=/\1==/p' setup.cfg > .venv-oldest/bounds.txt
	.venv-oldest/bin/pip install $(QUIETLY) -c .venv-oldest/bounds.txt -e '.[mpich,test]'
	.venv-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal -W ignore::DeprecationWarning

test-newest:
	python3.13 -m venv .venv-newest
	.venv-newest/bin/pip install $(QUIETLY) --upgrade --upgrade-strategy eager -e '.[mpich,test]'
	.venv-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal

mutants: $(STAMP)
	$(BIN)/python -m tools.nets.mutation see --workers $(WORKERS)
	$(BIN)/python -m tools.nets.mutation run --workers $(WORKERS) --sample $(MUTANTS)

fuzz: $(STAMP)
	$(BIN)/python -m tools.nets.fuzz --minutes $(MINUTES)

soak: $(STAMP)
	$(BIN)/python -m tools.nets.soak --minutes $(MINUTES)

test-gpu: $(STAMP)
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'PyTorch sees no GPU here'"
	$(BIN)/mpirun -n 2 $(BIN)/python -m mpi4dl.doctor
	$(BIN)/python -m pytest -rs tests/engine/test_gpu_training.py tests/comm/test_gpu.py tests/engine/test_memory.py tests/fakegpu

gpu-report: $(STAMP)
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf .venv .venv-oldest .venv-newest data runs results site build dist
