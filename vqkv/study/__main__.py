"""``python -m vqkv.study``."""

import gc

if __name__ == "__main__":
    gc.disable()  # see ``driver.IMPORTS``
    from vqkv.study.driver import app

    gc.freeze()
    gc.enable()
    app()
