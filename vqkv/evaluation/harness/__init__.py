"""Leaderboard tasks through lm-evaluation-harness: the only room that imports ``lm_eval``.

``run_tasks`` from Python, ``vqkv tasks`` on the command line. Importing this registers the model ``vqkv`` with lm_eval.
"""

try:
    import lm_eval  # noqa: F401
except ImportError as error:
    raise ImportError("tasks need lm-evaluation-harness: pip install 'vqkv[peers]'") from error

from vqkv.evaluation.harness.model import VqkvLM
from vqkv.evaluation.harness.run import run_tasks
from vqkv.evaluation.harness.tasks import LOCAL_FOLDER, SUITES, Entry, entries

__all__ = ["LOCAL_FOLDER", "SUITES", "Entry", "VqkvLM", "entries", "run_tasks"]
