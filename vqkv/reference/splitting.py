"""Deal the bundled text out to splits, near-duplicates apart: ``python -m vqkv.reference.splitting`` writes the lists.

Documents of one module stay together: a hash of its dotted name deals modules out. A near-duplicate of a document that
is held out (Jaccard similarity of at least 0.5 between sets of 8-token shingles, found by MinHash: Broder 1997;
Leskovec et al., Mining of Massive Datasets, section 3) is dropped.
"""

import re
import zlib
from collections.abc import Iterable

import numpy as np
from tqdm import tqdm

from vqkv.data.bundled import CORPORA, FOLDER, SPLITS, content_hash, dealt

try:
    from datasketch import MinHash, MinHashLSH
except ImportError as error:
    raise ImportError("near-duplicates are found by datasketch: pip install 'vqkv[dev]'") from error

SHINGLE = 8  # tokens
SIMILAR = 0.5  # from this Jaccard similarity on, two documents are twins
TOKEN = re.compile(r"\w+|[^\w\s]")


def shingles(text: str) -> np.ndarray:
    """Return sorted uint32 hashes of all runs of ``SHINGLE`` words or signs of a text."""
    tokens = np.array([zlib.crc32(token.encode()) for token in TOKEN.findall(text)], dtype=np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(tokens, min(SHINGLE, len(tokens)))
    weights = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, runs.shape[1] + 1, dtype=np.uint64)
    return np.unique(((runs * weights).sum(1) >> np.uint64(32)).astype(np.uint32))


class Twins:
    """Finds which of the documents it holds are near-duplicates of another document."""

    def __init__(self, documents: Iterable[tuple[str, str]]):
        self.index = MinHashLSH(threshold=0.4, num_perm=64)
        self.shingles: dict[str, np.ndarray] = {}
        for name, text in documents:
            if name not in self.shingles:
                self.shingles[name] = shingles(text)
                self.index.insert(name, _minhash(self.shingles[name]))

    def of(self, text: str) -> list[str]:
        """Return names of the held documents that are at least ``SIMILAR`` to this one."""
        mine = shingles(text)
        near = {name: self.shingles[name] for name in self.index.query(_minhash(mine))}
        shared = {name: len(np.intersect1d(mine, other, assume_unique=True)) for name, other in near.items()}
        return [name for name, both in shared.items() if both / (len(mine) + len(near[name]) - both) >= SIMILAR]


def _minhash(hashes: np.ndarray):
    signature = MinHash(num_perm=64, hashfunc=int)
    signature.update_batch(hashes.tolist())
    return signature


def main() -> None:
    """Write the three lists again: what is reported loses nothing to its twins, what is learned from loses most."""
    texts: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
    for corpus in ("python", "prose"):
        for document in tqdm(CORPORA[corpus](), desc=corpus, unit=" files"):
            if text := document.text():
                texts[dealt(document.module)].setdefault(content_hash(text), text)
    held: dict[str, str] = {}
    for split in reversed(SPLITS):
        twins = Twins(held.items())
        bar = tqdm(texts[split].items(), desc=split, unit=" documents")
        kept = {name: text for name, text in bar if name not in held and not twins.of(text)}
        print(f"{split}: {len(kept)} documents, {len(texts[split]) - len(kept)} more have a twin that is held out")
        (FOLDER / f"{split}.txt").write_text("".join(f"{name}\n" for name in sorted(kept)))
        held |= kept


if __name__ == "__main__":
    main()
