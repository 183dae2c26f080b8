# demo: trains gd and lt_nag on the same batches and compares them. test: all tests; quick: the
# equations and one run; check: lint, format and types. Each installs what it needs into .venv first.
PYTHON ?= python3
RUN = .venv/bin/python
# A file's tests share their fixtures, so each file goes to one worker; four of them at most, since
# some tests start processes of their own. Models are tiny: more threads would only wait.
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n logical --maxprocesses=4 --dist=loadfile \
	--no-loadscope-reorder

.PHONY: demo test quick check clean
demo: .venv/requirements
	$(RUN) data/pystdlib_char/prepare.py
	$(RUN) train.py config/demo_gd.py --overwrite=True
	$(RUN) train.py config/demo_lt_nag.py --overwrite=True
	$(RUN) plot.py out/demo_gd out/demo_lt_nag --out=out/demo.png
	$(RUN) sample.py --out_dir=out/demo_lt_nag --start='def ' --num_samples=1 --max_new_tokens=300

test: .venv/requirements-test
	$(PYTEST)

quick: .venv/requirements-test
	$(PYTEST) -m quick

check: .venv/requirements-test
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

.venv/%: %.txt requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	test -x $(RUN) || $(PYTHON) -m venv .venv
	$(RUN) -m pip install -q -r $<
	touch $@

clean:
	rm -rf .venv out
