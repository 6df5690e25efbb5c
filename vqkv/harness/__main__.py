"""``python -m vqkv.harness ...``: lm_eval's command line, knowing the model ``vqkv`` and this package's tasks.

For ``accelerate launch -m vqkv.harness --model vqkv ...``; ``vqkv lm-eval`` is the same.
"""

import sys

from vqkv.harness.command import main

main(sys.argv[1:])
