"""``import vqkv`` is fast: libraries that draw figures, run pages, fetch data or start workers wait until needed."""

import subprocess
import sys

LATER = ("matplotlib", "papermill", "datasets", "lm_eval", "dask", "distributed", "nbconvert", "faiss")


def test_importing_the_library_leaves_what_only_some_need():
    script = f"import sys, vqkv; print([name for name in {LATER} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
