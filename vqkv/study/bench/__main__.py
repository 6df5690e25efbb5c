"""``python -m vqkv.study.bench``."""

import sys

from vqkv.study.bench import speed

if __name__ == "__main__":
    try:
        speed.main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
