"""lm_eval and its task definitions print, log and draw bars wherever they run; a notebook should show none of it."""

import contextlib
import io
import logging
import sys


@contextlib.contextmanager
def without_logs():
    """Nothing below an error is logged."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def quiet():
    """Nothing reaches stdout; bars reach stderr only where that is a terminal. Errors are raised as ever."""
    aside = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with without_logs(), contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside):
        yield
