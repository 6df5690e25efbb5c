"""``python -m vqkv.evaluation.harness ...``, or ``vqkv lm-eval``: lm_eval's own command line. It finds models of its
package only (0.4.13 has no entry point for others), so ``--model vqkv`` needs a process that imported this first."""

import sys

from lm_eval.__main__ import cli_evaluate

from vqkv.evaluation.harness.tasks import LOCAL_FOLDER


def main(arguments: list[str]) -> None:
    """Run ``lm_eval ARGUMENTS``. This package's tasks are found unless ``--include_path`` names another folder.
    Ends with ``SystemExit`` as lm_eval does for arguments that it does not know."""
    before = sys.argv
    if len(arguments) > 1 and not any(argument.startswith("--include_path") for argument in arguments):
        arguments = [*arguments, "--include_path", str(LOCAL_FOLDER)]
    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


if __name__ == "__main__":
    main(sys.argv[1:])
