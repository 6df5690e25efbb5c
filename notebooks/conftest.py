"""nbval re-renders the committed pages from the stored tables: offline, with inline figures, and writing nowhere."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
