"""Train or go on training a bundled reference model: ``python -m vqkv.reference.train llama-mini``.

One script for any device; a killed run goes on from ``--state``, written every five minutes. Rows are repeats and
recall, then ever more text beside them; short rows and small steps come first. AdamW, because the models that the four
sources study were trained with it, and their outlier channels are partly its doing. The learning rate warms up, stays
constant and decays over the last fifth of ``--tokens``; the state before the decay is kept, so that a longer run goes
on as if there had been none.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from vqkv.reference.architectures import ARCHITECTURES
from vqkv.reference.data import TOKENIZER_DIR, write_stream
from vqkv.reference.machine import processor
from vqkv.reference.measure import PAIRS, abilities
from vqkv.reference.rows import IGNORE, TokenStream, Words, far_repeat, recall, repeats

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 200
DECAY_SHARE = 0.2
SAVE_SECONDS = 300
MEASURE_TOKENS = 500_000
SHAPES = [
    (0, [(8, 128), (4, 256)]),
    (2_000_000, [(8, 256), (8, 256), (4, 512), (2, 1024)]),
    (20_000_000, [(16, 256), (8, 512), (4, 1024)]),
]
CUDA_ROWS = 16  # times as many sequences a step on a GPU
# of rows, the last two being text, and tokens at which these have their share: brought in at once, with embeddings of
# usual size, text wiped the induction out in 0.1M
SHARES = {"recall": 0.1, "far": 0.05, "repeats": 0.05, "copied": 0.1, "text": 0.7}
TEXT_FROM = 1_000_000


class Mixture:
    """Batches as a function of the tokens seen and a seed."""

    def __init__(self, data: Path, tokenizer):
        self.text = TokenStream(data / "train.bin", tokenizer)
        self.vocabulary = np.arange(1, len(tokenizer))
        self.words = Words.of(tokenizer)

    def shape(self, tokens: int, seed: int) -> tuple[int, int]:
        """(sequences, tokens a sequence) of a step."""
        shapes = [row[1] for row in SHAPES if row[0] <= tokens][-1]
        return shapes[np.random.default_rng([seed, 2]).integers(len(shapes))]

    def batch(self, rows: int, seq_len: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, labels), both (rows, seq_len) int64; labels are -100 where nothing can be known."""
        rng = np.random.default_rng([seed, 3])
        shares = np.array([*SHARES.values()])
        shares[-2:] *= min(1, tokens / TEXT_FROM)
        kinds = rng.choice([*SHARES], rows, p=shares / shares.sum())
        found = [self._row(rng, kind, seq_len) for kind in kinds]
        tokens, labels = (torch.from_numpy(np.stack(column).astype(np.int64)) for column in zip(*found))
        return tokens, labels

    def _row(self, rng, kind: str, seq_len: int):
        if kind == "recall":
            return self._recall(rng, seq_len)
        if kind == "far":
            return far_repeat(rng, seq_len, self.vocabulary)
        if kind == "repeats":
            return repeats(rng, seq_len, self.vocabulary)
        return self.text.copied(rng, seq_len) if kind == "copied" else self.text.window(rng, seq_len)

    def _recall(self, rng, seq_len: int):
        """Most rows with room for it have a text between the pairs and the queries."""
        num_pairs = min(int(rng.choice(PAIRS)), (seq_len - 1) // 6)
        gap = seq_len - 1 - 6 * num_pairs - 1
        filler = self.text.span(rng, rng.integers(8, gap)) if gap > 16 and rng.random() < 0.8 else None
        return recall(rng, seq_len, self.words, num_pairs, filler)[:2]


class Trainer:
    """A model, its optimizer and a log; everything else follows from those."""

    def __init__(self, name: str, device: str, data: Path, state: Path, total: int):
        self.name, self.device, self.state_dir, self.total = name, device, state, total
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
        self.mixture = Mixture(data, self.tokenizer)
        self.validation = TokenStream(data / "validation.bin", self.tokenizer)
        torch.manual_seed(0)
        self.model = ARCHITECTURES[name]().to(device)
        self.optimizer = adamw(self.model)
        self.log = {"tokens": 0, "steps": 0, "loss": [], "measured": [], "runs": []}
        if (state / "log.json").exists():
            self._resume()

    def _resume(self) -> None:
        self.log = json.loads((self.state_dir / "log.json").read_text())
        self.model.load_state_dict(load_file(self.state_dir / "model.safetensors"), strict=False)
        self.model.tie_weights()
        whole = self.optimizer.state_dict()
        for name, value in load_file(self.state_dir / "optimizer.safetensors").items():
            index, key = name.split(".")
            whole["state"].setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict(whole)

    def step(self) -> float:
        """One optimizer step; returns the training loss."""
        log = self.log
        rows, seq_len = self.mixture.shape(log["tokens"], log["steps"])
        rows *= CUDA_ROWS if self.device == "cuda" else 1
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=_fast_bf16(self.device)):
            loss = next_token_loss(self.model, *self.mixture.batch(rows, seq_len, log["tokens"], log["steps"]))
        update(self.model, self.optimizer, loss, LEARNING_RATE * self._scale())
        log["steps"] += 1
        log["tokens"] += rows * seq_len
        return loss.item()

    def _scale(self) -> float:
        warm = min(1.0, (self.log["steps"] + 1) / WARMUP_STEPS)
        left = (self.total - self.log["tokens"]) / (DECAY_SHARE * self.total)
        return warm * min(1.0, max(0.01, left))

    def run(self) -> None:
        """Train until ``total`` tokens are seen, measuring and saving on the way."""
        log, begin = self.log, time.monotonic()
        log["runs"].append(_machine(self.device) | {"tokens": 0, "seconds": 0})
        earlier, saved, losses = log["tokens"], begin, []
        with tqdm(total=self.total, initial=log["tokens"], desc=self.name, unit=" tokens", mininterval=10) as bar:
            if not log["measured"]:
                self._measure(bar)
            while log["tokens"] < self.total:
                before = log["tokens"]
                losses.append(self.step())
                log["runs"][-1] |= {"tokens": log["tokens"] - earlier, "seconds": round(time.monotonic() - begin)}
                if len(losses) == 50:
                    log["loss"].append([log["tokens"], round(sum(losses) / len(losses), 4)])
                    losses.clear()
                if before // MEASURE_TOKENS != log["tokens"] // MEASURE_TOKENS:
                    self._measure(bar)
                if time.monotonic() - saved > SAVE_SECONDS:
                    self.save_state()
                    saved = time.monotonic()
                decay = (1 - DECAY_SHARE) * self.total
                if before < decay <= log["tokens"]:
                    self.save_state()
                    shutil.copytree(self.state_dir, self.state_dir.with_name(f"{self.state_dir.name}-{before}"))
                bar.update(log["tokens"] - before)
        self.save_state()

    def _measure(self, bar) -> None:
        """Log recall by pairs and distance, induction and bits per byte."""
        self.model.eval()
        found = abilities(self.model, self.tokenizer, self.mixture.words, self.validation, windows=32)
        self.model.train()
        self.log["measured"].append({"tokens": self.log["tokens"]} | found)
        bar.write(json.dumps(self.log["measured"][-1]))

    def save_state(self) -> None:
        """Keep weights in fp32, the optimizer's moments and the log: a killed run goes on from there."""
        self.state_dir.mkdir(parents=True, exist_ok=True)
        weights = {k: v.clone().contiguous() for k, v in self.model.state_dict().items() if k != "lm_head.weight"}
        moments = {
            f"{i}.{key}": value.clone()
            for i, state in self.optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }
        _save(weights, self.state_dir / "model.safetensors")
        _save(moments, self.state_dir / "optimizer.safetensors")
        _write(self.state_dir / "log.json", json.dumps(self.log))

    def release(self, folder: Path, test: TokenStream) -> None:
        """Write the fp16 model, its tokenizer and the training log, with what it can do on the test split."""
        self.model.eval()
        self.log["released"] = abilities(self.model, self.tokenizer, self.mixture.words, test, windows=200, rows=64)
        temporary = folder.with_name(folder.name + ".part")
        half = ARCHITECTURES[self.name]()
        half.load_state_dict(self.model.state_dict())
        half.half().save_pretrained(temporary)
        self.tokenizer.save_pretrained(temporary)
        _write(temporary / "training.json", json.dumps(self.log))
        folder.mkdir(parents=True, exist_ok=True)
        for path in temporary.iterdir():
            os.replace(path, folder / path.name)
        temporary.rmdir()


def next_token_loss(model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy in nats: the mean over sequences of each one's mean over its labelled tokens.

    So a recall sequence's few answers weigh as much as a sequence of text. Logits are made at labelled places only.
    """
    tokens, targets = tokens.to(model.device), labels[:, 1:].to(model.device)
    asked = targets != IGNORE
    weights = (asked / asked.sum(1, keepdim=True).clamp_min(1) / len(targets))[asked]
    logits = model.lm_head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][asked])
    return (F.cross_entropy(logits.float(), targets[asked], reduction="none") * weights).sum()


def update(model, optimizer: torch.optim.Optimizer, loss: torch.Tensor, lr: float) -> None:
    """One step down the gradient, clipped to norm 1, at this learning rate."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def adamw(model) -> torch.optim.AdamW:
    """Weight decay on matrices other than embeddings."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p not in embeddings]
    others = [p for p in model.parameters() if p.ndim < 2 or p in embeddings]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def _fast_bf16(device: str) -> bool:
    return device == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _machine(device: str) -> dict:
    where = torch.cuda.get_device_name() if device == "cuda" else processor()
    return {"device": where, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _save(tensors: dict, path: Path) -> None:
    save_file(tensors, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def _write(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    os.replace(path.with_suffix(".part"), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path.home() / ".cache/vqkv"
    parser.add_argument("name", choices=sorted(ARCHITECTURES))
    parser.add_argument("--tokens", type=int, default=60_000_000, help="tokens seen in all when the run ends")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--data", type=Path, default=home / "reference-data", help="token ids, made when missing")
    parser.add_argument("--state", type=Path, help="what a killed run goes on from (default: beside the data)")
    parser.add_argument("--out", type=Path, help="folder of the released model (default: into the package)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    for split in ("train", "validation", "test"):
        if not (args.data / f"{split}.bin").exists():
            write_stream(args.data / f"{split}.bin", tokenizer, split)
    state = args.state or args.data.parent / "reference-state" / args.name
    trainer = Trainer(args.name, args.device, args.data, state, args.tokens)
    trainer.run()
    out = args.out or Path(__file__).parent / args.name
    trainer.release(out, TokenStream(args.data / "test.bin", trainer.tokenizer))


if __name__ == "__main__":
    main()
