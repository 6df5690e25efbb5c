"""``python -m vqkv.study.bench``."""

import typer

from vqkv.study.bench.speed import main

if __name__ == "__main__":
    typer.run(main)
