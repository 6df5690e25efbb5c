"""``python -m vqkv.study.bench``."""

import sys

from vqkv.study.bench import main

if __name__ == "__main__":  # the processes that ``peak`` starts import this module, too
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
