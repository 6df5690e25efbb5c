"""A fine-tuning that is killed again and again: ``python finetune_job.py MODEL OUT``, or shared by processes under
torchrun: ``finetune_job.py MODEL OUT once``."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import vqkv
from vqkv import presets
from vqkv.finetune import finetune
from vqkv.processes import launched
from vqkv.trained_weights import attention_weights

TOKENS = torch.randint(0, 400, (36, 30), generator=torch.Generator().manual_seed(0))
PRESET = presets.vqllm(2, 16, 8, revive=True, decay=0.5)
SETTINGS = {"lr": 1e-3, "batch_size": 6, "micro_batch": 4}
KILLS = 8


def run(model_folder: str, out: Path, checkpoint=None) -> None:
    """Fine-tune, and write all that came out."""
    torch.set_num_threads(1)
    with launched() as processes:
        model, _ = vqkv.load_model(model_folder)
        made = finetune(model, TOKENS, PRESET, **SETTINGS, checkpoint=checkpoint)
        if processes.first:
            tensors = {f"weights.{i}": weight.detach() for i, weight in enumerate(attention_weights(model))}
            tensors["losses"] = torch.tensor(made.losses, dtype=torch.float64)
            save_file(tensors | {k: v.clone() for k, v in made.compressor._learned().items()}, out)


def start(*arguments) -> int:
    """The process id of a child that runs."""
    if child := os.fork():
        return child
    try:
        run(*arguments)
    finally:
        os._exit(0 if arguments[1].exists() else 1)


def strike(child: int, seconds: float) -> bool:
    """Whether SIGKILL after so many seconds, at the latest at its own end, found the child at work."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(model_folder: str, out: Path) -> None:
    """Once without a break, then with: as often as it takes until it was killed ``KILLS`` times at random moments."""
    begun = time.monotonic()
    os.waitpid(start(model_folder, out / "whole"), 0)
    longest, rng, kills, rounds = time.monotonic() - begun, random.Random(0), 0, 0
    while kills < KILLS:
        rounds, ended = rounds + 1, False
        while not ended:
            seconds = rng.uniform(0, longest) if kills < KILLS else float("inf")
            ended = not strike(start(model_folder, out / f"killed-{rounds}", out / f"checkpoint-{rounds}"), seconds)
            kills += not ended
            longest *= 0.7 if ended else 1  # the first run was slow: strike earlier
    print(f"killed {kills} times in {rounds} rounds")


if __name__ == "__main__":
    if sys.argv[3:] == ["once"]:
        run(sys.argv[1], Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]))
