"""``python -m vqkv.evaluation.harness ...``: lm_eval's command line, knowing our model and tasks.

For ``accelerate launch -m vqkv.evaluation.harness --model vqkv ...``; ``vqkv lm-eval`` is the same.
"""

import sys

from vqkv.evaluation.harness.command import main

main(sys.argv[1:])
