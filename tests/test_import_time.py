"""``import vqkv`` is fast, and so is the study's driver: libraries that draw figures, run pages, fetch data or start
workers wait until needed."""

import subprocess
import sys

LATER = ("matplotlib", "papermill", "nbformat", "lm_eval", "dask", "distributed", "nbconvert", "faiss")


def test_importing_leaves_what_only_some_need():
    script = f"import sys, vqkv, vqkv.study.driver; print([n for n in ('datasets', *{LATER}) if n in sys.modules])\n"
    script += f"import vqkv.study.dry_run; print([n for n in {LATER} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n[]\n"
