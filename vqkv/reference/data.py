"""The tokenizer of the bundled models, and the files of token ids that they are trained on."""

from pathlib import Path

import numpy as np
from tqdm import tqdm

from vqkv.data.bundled import documents
from vqkv.runtime.files import replacing

CORPORA = ("python", "prose-files")
TOKENIZER_DIR = Path(__file__).parent / "tokenizer"


def token_bytes(tokenizer) -> np.ndarray:
    """(vocab_size,) UTF-8 bytes that each token stands for: what bits per byte divides by."""
    sizes = np.zeros(len(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if index in tokenizer.all_special_ids else len(token)  # byte-level: one character a byte
    return sizes


def write_stream(path: Path, tokenizer, split: str) -> None:
    """Write the token ids of every document of one split, source and prose, to a uint16 file."""
    with replacing(path) as file:
        for name in CORPORA:
            for text in tqdm(documents(name, split), desc=f"tokenise {name} {split}", unit=" documents"):
                ids = tokenizer.encode(text, add_special_tokens=False)
                file.write(np.array([tokenizer.bos_token_id, *ids], dtype=np.uint16).tobytes())
