"""``python -m vqkv.study``."""

from vqkv.study.driver import app

if __name__ == "__main__":
    app()
