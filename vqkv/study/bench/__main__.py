"""``python -m vqkv.study.bench``."""

import sys

from vqkv.study.bench import generation, speed

if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["generate"]:
            generation.main(sys.argv[2:])
        else:
            speed.main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
