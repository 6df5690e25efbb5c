"""The text and the tokenizer that the reference models are trained on."""

import argparse
import os
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from vqkv.data.bundled import documents
from vqkv.data.splits import SPLITS

VOCAB_SIZE = 4096
BOS = "<|bos|>"
CORPORA = ("python", "prose-files")
TOKENIZER_DIR = Path(__file__).parent / "tokenizer"


def train_tokenizer(max_documents: int = 3000) -> PreTrainedTokenizerFast:
    """Byte-level BPE with 4,096 tokens, so that no text is unknown; one special token marks where a document begins."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for name in CORPORA for text, _ in zip(documents(name, "train"), range(max_documents)))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, pad_token=BOS, model_max_length=1024
    )


def token_bytes(tokenizer) -> np.ndarray:
    """(vocab_size,) UTF-8 bytes that each token stands for: what bits per byte divides by."""
    sizes = np.zeros(len(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if index in tokenizer.all_special_ids else len(token)  # byte-level: one character a byte
    return sizes


def write_stream(path: Path, tokenizer, split: str) -> int:
    """Tokenise every document of one split of source and prose to a uint16 file; return the number of tokens."""
    total, temporary = 0, path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(temporary, "wb") as out:
        for name in CORPORA:
            batch = []
            for text in tqdm(documents(name, split), desc=f"tokenise {name} {split}", unit=" documents"):
                batch.append(text)
                if len(batch) == 256:
                    total += _write(batch, tokenizer, out)
                    batch = []
            total += _write(batch, tokenizer, out)
    os.replace(temporary, path)
    return total


def _write(texts, tokenizer, out) -> int:
    if not texts:
        return 0
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = np.concatenate([np.array([tokenizer.bos_token_id, *row], dtype=np.uint16) for row in rows])
    out.write(ids.tobytes())
    return len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for SPLIT.bin (uint16 token ids)")
    parser.add_argument("--new-tokenizer", action="store_true", help="train the tokenizer first and store it")
    args = parser.parse_args()
    if args.new_tokenizer:
        train_tokenizer().save_pretrained(TOKENIZER_DIR)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    for split in SPLITS:
        count = write_stream(args.out / f"{split}.bin", tokenizer, split)
        print(f"{split}: {count:,} tokens in {args.out / f'{split}.bin'}")


if __name__ == "__main__":
    main()
