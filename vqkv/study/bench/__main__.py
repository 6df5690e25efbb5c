"""``python -m vqkv.study.bench``."""

import sys

from vqkv.study.bench.speed import main

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
