"""Train a bundled reference model: ``python -m vqkv.reference.train llama-mini``.

The bundled models were trained by a loop of our own with this recipe. Transformers' trainer draws the same batches and
has the same losses, to bf16. It takes a GPU where there is one, and a killed run goes on from its last checkpoint.

Rows are repeats and recall, then ever more text with them; short rows and small steps come first. AdamW, because the
models that the four sources study were trained with it, and their outlier channels are partly its doing. The learning
rate warms up, stays constant and decays over the last fifth of ``--tokens``.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from vqkv.reference.induction import CIRCUITS, untrained
from vqkv.reference.measure import PAIRS, abilities
from vqkv.reference.rows import IGNORE, TOKENIZER_DIR, TokenStream, Words, far_repeat, recall, repeats, write_stream
from vqkv.runtime.files import cache_folder

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 200
DECAY_SHARE = 0.2
SHAPES = [  # tokens seen, and from then on (sequences, tokens of each) of a step
    (0, [(8, 128), (4, 256)]),
    (2_000_000, [(8, 256), (8, 256), (4, 512), (2, 1024)]),
    (20_000_000, [(16, 256), (8, 512), (4, 1024)]),
]
CUDA_ROWS = 16  # times as many sequences a step on a GPU
# of rows, the last two being text, and tokens at which these have their share: brought in at once, with embeddings of
# usual size, text wiped the induction out in 0.1M
SHARES = {"recall": 0.1, "far": 0.05, "repeats": 0.05, "copied": 0.1, "text": 0.7}
TEXT_FROM = 1_000_000


class Mixture(Dataset):
    """The batch of every step until ``total`` tokens are seen, and its learning rate."""

    def __init__(self, text: TokenStream, tokenizer, total: int, times: int = 1):
        self.text, self.words, self.total = text, Words.of(tokenizer), total
        self.vocabulary = np.arange(1, len(tokenizer))
        self.shapes: list[tuple[int, int]] = []
        self.seen = [0]  # tokens before every step
        while self.seen[-1] < total:
            shapes = [shapes for begin, shapes in SHAPES if begin <= self.seen[-1]][-1]
            rows, seq_len = shapes[np.random.default_rng([len(self.shapes), 2]).integers(len(shapes))]
            self.shapes.append((times * rows, seq_len))
            self.seen.append(self.seen[-1] + times * rows * seq_len)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        """Return tokens and labels, both (rows, seq_len) int64; labels are -100 where nothing can be known."""
        rows, seq_len = self.shapes[step]
        rng = np.random.default_rng([step, 3])
        shares = np.array([*SHARES.values()])
        shares[-2:] *= min(1, self.seen[step] / TEXT_FROM)
        kinds = rng.choice([*SHARES], rows, p=shares / shares.sum())
        drawn = [self._row(rng, kind, seq_len) for kind in kinds]
        tokens, labels = (torch.from_numpy(np.stack(column).astype(np.int64)) for column in zip(*drawn))
        return {"input_ids": tokens, "labels": labels}

    def _row(self, rng, kind: str, seq_len: int):
        if kind == "recall":  # most that have room for it have a text between the pairs and the queries
            num_pairs = min(int(rng.choice(PAIRS)), (seq_len - 1) // 6)
            gap = seq_len - 1 - 6 * num_pairs - 1
            filler = self.text.span(rng, int(rng.integers(8, gap))) if gap > 16 and rng.random() < 0.8 else None
            return recall(rng, seq_len, self.words, num_pairs, filler)
        if kind in ("far", "repeats"):
            return (far_repeat if kind == "far" else repeats)(rng, seq_len, self.vocabulary)
        return (self.text.copied if kind == "copied" else self.text.window)(rng, seq_len)

    def learning_rate(self, step: int) -> float:
        """Share of ``LEARNING_RATE``."""
        left = (self.total - self.seen[step]) / (DECAY_SHARE * self.total)
        return min(1, (step + 1) / WARMUP_STEPS) * min(1, max(0.01, left))


def next_token_loss(outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    """Return the next-token cross-entropy in nats: the mean over sequences of each one's mean over its labelled tokens.

    So a recall sequence's few answers weigh as much as a sequence of text.
    """
    targets = labels[:, 1:]
    losses = F.cross_entropy(outputs.logits[:, :-1].float().transpose(1, 2), targets, reduction="none")
    return (losses.sum(1) / (targets != IGNORE).sum(1).clamp_min(1)).mean()


def adamw(model) -> torch.optim.AdamW:
    """Make AdamW, with weight decay on matrices other than embeddings."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p not in embeddings]
    others = [p for p in model.parameters() if p.ndim < 2 or p in embeddings]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


class MeasuringTrainer(Trainer):
    """Measures a model's ``abilities`` where another trainer takes a loss on ``eval_dataset``."""

    def evaluate(self, *args, **kwargs) -> dict:
        self.model.eval()
        self.log(metrics := abilities(self.model, self.processing_class, self.eval_dataset, windows=32))
        return metrics


def trainer(name: str, folder: Path, total: int) -> MeasuringTrainer:
    """Return the trainer of a model on the token files in ``folder``, with checkpoints in its ``name``."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    train, validation = (TokenStream(folder / f"{split}.bin", tokenizer) for split in ("train", "validation"))
    on_gpu = torch.cuda.is_available()
    mixture = Mixture(train, tokenizer, total, CUDA_ROWS if on_gpu else 1)
    torch.manual_seed(0)
    model = untrained(name)
    optimizer = adamw(model)
    arguments = TrainingArguments(
        str(folder / name),
        use_cpu=not on_gpu,
        bf16=on_gpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        per_device_train_batch_size=1,  # an item of the mixture is a batch
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        max_grad_norm=1.0,
        logging_steps=50,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=0.05,  # of all steps
        save_steps=0.05,
        report_to="none",
    )
    return MeasuringTrainer(
        model,
        arguments,
        data_collator=lambda batches: batches[0],
        train_dataset=mixture,
        eval_dataset=validation,
        processing_class=tokenizer,
        compute_loss_func=next_token_loss,
        optimizers=(optimizer, LambdaLR(optimizer, mixture.learning_rate)),
    )


def release(done: MeasuringTrainer, out: Path, test: TokenStream) -> None:
    """Write the fp16 model, its tokenizer and the training log, with what it can do on the test split."""
    model = AutoModelForCausalLM.from_config(done.model.config, dtype=torch.float16)
    model.load_state_dict(done.model.state_dict())
    model.save_pretrained(out)
    done.processing_class.save_pretrained(out)
    metrics = abilities(model.float().to(done.args.device).eval(), done.processing_class, test, windows=200, rows=64)
    where = (platform.processor() or platform.machine()) if done.args.use_cpu else torch.cuda.get_device_name()
    log = {"tokens": done.train_dataset.seen[-1], "steps": done.state.global_step, "device": where, "released": metrics}
    (out / "training.json").write_text(json.dumps(log | {"log": done.state.log_history}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(CIRCUITS))
    parser.add_argument("--tokens", type=int, default=60_000_000, help="tokens seen in all when the run ends")
    parser.add_argument("--folder", type=Path, default=cache_folder("reference"), help="of token ids and checkpoints")
    parser.add_argument("--out", type=Path, help="folder of the released model (default: into the package)")
    args = parser.parse_args()
    (args.folder / args.name).mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    for split in ("train", "validation", "test"):
        if not (args.folder / f"{split}.bin").exists():
            write_stream(args.folder / f"{split}.bin", tokenizer, split)
    training = trainer(args.name, args.folder, args.tokens)
    training.train(resume_from_checkpoint=get_last_checkpoint(args.folder / args.name))
    release(training, args.out or Path(__file__).parent / args.name, TokenStream(args.folder / "test.bin", tokenizer))


if __name__ == "__main__":
    main()
