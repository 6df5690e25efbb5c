"""Train or go on training a bundled reference model: ``python -m vqkv.reference.train llama-mini --minutes 60``.

One script for any device. AdamW, because the models that the four sources study were trained with it, and their
outlier channels are partly its doing. The learning rate warms up, stays constant, and decays over the last fifth of
the run; the state before the decay is kept in ``--state``, so that the next run goes on as if there had been none.
Without that state the next run continues from the released weights and warms up again.
"""

import argparse
import contextlib
import json
import math
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from vqkv.machine import processor
from vqkv.reference import card
from vqkv.reference.architectures import ARCHITECTURES
from vqkv.reference.data import RECALL_SHARE, TOKENIZER_DIR, TrainingStream, token_bytes, write_stream

LEARNING_RATE = 2e-3
WARMUP_STEPS = 200
DECAY_SHARE = 0.2
LOSS_CURVE_POINTS = 400
# (from this many tokens on, sequences a step, tokens a sequence): many small steps first, then longer contexts
SCHEDULES = {
    "cpu": [(0, 4, 256), (2_500_000, 4, 512), (7_000_000, 4, 1024)],
    "cuda": [(0, 64, 512), (50_000_000, 128, 1024)],
}


class Trainer:
    """A model, its optimizer and the number of tokens seen; everything else follows from those."""

    def __init__(
        self,
        name: str,
        device: str,
        data: Path,
        state: Path,
        release: Path,
        compile_model: bool = False,
        optimizer: str = "adamw",
    ):
        self.name, self.device, self.state_dir, self.release_dir = name, device, state, release
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
        self.train_stream = TrainingStream(data / "train.bin", self.tokenizer)
        self.test_stream = TrainingStream(data / "test.bin", self.tokenizer)
        torch.manual_seed(0)
        self.model = ARCHITECTURES[name]().to(device)
        self.optimizers = _optimizers(self.model, optimizer)
        self.log = {"tokens": 0, "steps": 0, "loss": [], "held_out": [], "runs": []}
        self.warm_from = 0
        self._resume()
        self.forward = torch.compile(self.model, dynamic=False) if compile_model else self.model

    def _resume(self) -> None:
        released = self.release_dir / "training.json"
        if (self.state_dir / "log.json").exists():
            self.log = json.loads((self.state_dir / "log.json").read_text())
            self.model.load_state_dict(load_file(self.state_dir / "model.safetensors"), strict=False)
            moments = load_file(self.state_dir / "optimizer.safetensors")
            same = _load_moments(self.optimizers, moments)
            self.warm_from = -WARMUP_STEPS if same else self.log["steps"]
        elif released.exists():
            self.log = json.loads(released.read_text())
            weights = AutoModelForCausalLM.from_pretrained(self.release_dir, dtype=torch.float32)
            self.model.load_state_dict(weights.state_dict())
            self.warm_from = self.log["steps"]
        self.model.tie_weights()

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Next-token cross-entropy in nats, bf16 where the device is fast at it: the mean over sequences of each one's
        mean over its labelled tokens, so that a recall sequence's few answers weigh as much as a sequence of text."""
        tokens, labels = tokens.to(self.device), labels.to(self.device)
        with _autocast(self.device):
            logits = self.forward(input_ids=tokens, use_cache=False).logits
        targets = labels[:, 1:]
        nats = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none")
        labelled = (targets != -100).sum(1).clamp_min(1)
        return (nats.view_as(targets).sum(1) / labelled).mean()

    def step(self, scale: float) -> float:
        """One optimizer step at ``scale`` times the learning rate; returns the training loss."""
        batch_size, seq_len = self._shape()
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = LEARNING_RATE * scale
        loss = self.loss(*self.train_stream.batch(batch_size, seq_len, seed=self.log["steps"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.log["steps"] += 1
        self.log["tokens"] += batch_size * seq_len
        return loss.item()

    def _shape(self) -> tuple[int, int]:
        return [row[1:] for row in SCHEDULES[self.device] if row[0] <= self.log["tokens"]][-1]

    def run(self, minutes: float, tokens: int) -> None:
        """Train until the budget (whichever of minutes and tokens ends first) is spent, then write the release."""
        begin, begin_tokens = time.monotonic(), self.log["tokens"]
        self.log["runs"].append(
            {
                "device": torch.cuda.get_device_name() if self.device == "cuda" else processor(),
                "threads": torch.get_num_threads(),
                "recall_share": RECALL_SHARE,
                "optimizer": "+".join(type(optimizer).__name__ for optimizer in self.optimizers),
            }
        )
        saved, decaying, losses = begin, False, []
        with tqdm(total=100, desc=self.name, unit="%") as bar:
            while True:
                now = time.monotonic()
                spent = max((now - begin) / (60 * minutes), (self.log["tokens"] - begin_tokens) / tokens)
                if spent >= 1:
                    break
                if spent >= 1 - DECAY_SHARE and not decaying:
                    decaying = True
                    self.save_state()
                elif now - saved > 300 and not decaying:
                    saved = now
                    self.save_state()
                losses.append(self.step(self._scale(spent)))
                run = {"tokens": self.log["tokens"] - begin_tokens, "seconds": round(time.monotonic() - begin)}
                self.log["runs"][-1] |= run | {"torch": torch.__version__}
                if len(losses) == 50:
                    self.log["loss"].append([self.log["tokens"], round(sum(losses) / len(losses), 4)])
                    losses.clear()
                bar.update(min(100, 100 * spent) - bar.n)
                bar.set_postfix(tokens=f"{self.log['tokens']:,}", loss=self.log["loss"][-1:])
        self.release()

    def _scale(self, spent: float) -> float:
        warm = min(1.0, (self.log["steps"] - self.warm_from + 1) / WARMUP_STEPS)
        return warm * min(1.0, max(0.02, (1 - spent) / DECAY_SHARE))

    @torch.no_grad()
    def bits_per_byte(self, num_batches: int = 24, seq_len: int = 1024) -> float:
        """Held-out bits per UTF-8 byte of source text (no recall sequences), each window read from its own BOS."""
        sizes = torch.from_numpy(token_bytes(self.tokenizer))
        nats = text_bytes = 0
        for seed in range(num_batches):
            tokens = self.test_stream.text_batch(4, seq_len, seed)
            nats += self.loss(tokens, tokens).item() * (tokens.numel() - len(tokens))
            text_bytes += sizes[tokens[:, 1:]].sum().item()
        return nats / text_bytes / math.log(2)

    def save_state(self) -> None:
        """Keep weights in fp32 and the optimizer's moments, so that a killed or finished run goes on without a seam."""
        self.state_dir.mkdir(parents=True, exist_ok=True)
        weights = {k: v.clone().contiguous() for k, v in self.model.state_dict().items() if k != "lm_head.weight"}
        _save(weights, self.state_dir / "model.safetensors")
        _save(_moments(self.optimizers), self.state_dir / "optimizer.safetensors")
        _write(self.state_dir / "log.json", json.dumps(self.log))

    def release(self) -> None:
        """Write the fp16 model, its tokenizer, the training log and the model card."""
        bits = self.bits_per_byte()
        self.log["held_out"].append([self.log["tokens"], round(bits, 4)])
        self.log["loss"] = self.log["loss"][:: math.ceil((len(self.log["loss"]) + 1) / LOSS_CURVE_POINTS)]
        temporary = self.release_dir.with_name(self.release_dir.name + ".part")
        half = ARCHITECTURES[self.name]()
        half.load_state_dict(self.model.state_dict())
        half.half().save_pretrained(temporary)
        self.tokenizer.save_pretrained(temporary)
        _write(temporary / "training.json", json.dumps(self.log))
        card.write(temporary, self.name, half, self.log)
        self.release_dir.mkdir(parents=True, exist_ok=True)
        for path in temporary.iterdir():
            os.replace(path, self.release_dir / path.name)
        temporary.rmdir()
        print(f"{self.name}: {self.log['tokens']:,} tokens, held-out {bits:.4f} bits per byte -> {self.release_dir}")


def _optimizers(model, kind: str) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layers' matrices and AdamW for the rest."""
    matrices = [
        p for n, p in model.named_parameters() if p.ndim == 2 and "emb" not in n and "wte" not in n and "wpe" not in n
    ]
    embeddings = [p for n, p in model.named_parameters() if p.ndim == 2 and all(p is not m for m in matrices)]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    rest = [{"params": embeddings, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "fused": True}
    if kind == "muon":
        muon = torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(rest, **adamw)]
    return [torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, *rest], **adamw)]


def _moments(optimizers) -> dict[str, torch.Tensor]:
    return {
        f"{type(optimizer).__name__}.{i}.{key}": value.clone()
        for optimizer in optimizers
        for i, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def _load_moments(optimizers, flat: dict[str, torch.Tensor]) -> bool:
    """Whether the moments were those of the same optimizers, and so were taken over."""
    kinds = {type(optimizer).__name__ for optimizer in optimizers}
    if {name.split(".")[0] for name in flat} != kinds:
        return False
    for optimizer in optimizers:
        whole = optimizer.state_dict()
        for name, value in flat.items():
            kind, index, key = name.split(".")
            if kind == type(optimizer).__name__:
                whole["state"].setdefault(int(index), {})[key] = value
        optimizer.load_state_dict(whole)
    return True


def _autocast(device: str):
    fast = device == "cuda" or torch.cpu._is_amx_tile_supported()
    return torch.autocast(device, dtype=torch.bfloat16) if fast else contextlib.nullcontext()


def _save(tensors: dict, path: Path) -> None:
    save_file(tensors, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def _write(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    os.replace(path.with_suffix(".part"), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(ARCHITECTURES))
    parser.add_argument("--minutes", type=float, default=math.inf, help="wall-clock budget of this run")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="token budget of this run")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: all)")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon wants fast bf16 products")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model (1.4x on a CPU with AMX)")
    parser.add_argument("--data", type=Path, default=Path.home() / ".cache/vqkv/reference-data")
    parser.add_argument(
        "--state", type=Path, help="where the state before the decay is kept (default: beside the data)"
    )
    parser.add_argument("--out", type=Path, help="where the released model goes (default: into the package)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    for split in ("train", "test"):
        if not (args.data / f"{split}.bin").exists():
            write_stream(args.data / f"{split}.bin", tokenizer, split)
    state = args.state or args.data.parent / "reference-state" / args.name
    out = args.out or Path(__file__).parent / args.name
    trainer = Trainer(args.name, args.device, args.data, state, out, args.compile, args.optimizer)
    trainer.run(args.minutes, args.tokens)


if __name__ == "__main__":
    main()
