"""model + corpus + preset -> compressor, in constant memory, by one process or many, also after it was killed."""

import os
import shutil
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor
from tqdm import tqdm

from vqkv.capture import capture, check_batch_size, check_rope, check_tokens
from vqkv.checkpoint import Checkpoint
from vqkv.codec.base import Codec
from vqkv.codec.learning import collected, hand_out
from vqkv.coder import ROLES
from vqkv.compressor import Compressor
from vqkv.corpus import fingerprint
from vqkv.costs import metrics
from vqkv.errors import DataError, FormatError
from vqkv.layer_fit import fit_layers
from vqkv.models import describe, difference, layer_devices, weights_fingerprint
from vqkv.presets import Preset
from vqkv.processes import alone, current
from vqkv.settings import CacheSettings
from vqkv.sharing import ModelTrial
from vqkv.spill import CapturedTokens

DONE, PART = "compressor", "compressor.part"


def calibrate(
    model,
    tokens: torch.Tensor,
    preset: Preset,
    batch_size: int = 8,
    progress: bool = True,
    captured: CapturedTokens | None = None,
    checkpoint=None,
) -> Compressor:
    """Fit ``preset`` to ``model`` on ``tokens`` (num_seqs, seq_len), ``batch_size`` sequences at a time, so that memory
    does not grow with the number of tokens.

    The first batch initialises the codebooks, each further batch is one learning step. A preset with predictors is
    fitted layer by layer (AQUA-KV, Algorithm 1), for which keys and values go to a temporary folder; ``captured`` may
    hold them already, in batches of its own.

    ``checkpoint``: a folder that keeps what was learned after every batch, or every layer's keys or values where there
    are predictors. Called again with the same arguments, a calibration that was killed goes on from there and ends with
    the same bits; one that had ended is read back. The folder is the caller's to delete.

    Within ``processes.launched()`` every process calls this with the same arguments, works on its share of each batch
    and returns the same compressor. Raises ``DataError`` for an empty input, a head_dim that the preset cannot divide,
    fewer vectors in the first batch than codes, a batch with fewer sequences than processes, or a disk without room;
    ``FormatError`` for a checkpoint of another job.
    """
    if not isinstance(preset, Preset):
        raise DataError(f"preset must be a Preset such as presets.vqllm(), not {type(preset).__name__}")
    check_tokens(model, tokens)
    check_batch_size(batch_size)
    if preset.plan is not None and tokens.shape[1] <= preset.sink_tokens:
        raise DataError(f"{tokens.shape[1]} tokens a sequence, of which {preset.sink_tokens} are sinks: none is packed")
    if preset.pre_rope:
        check_rope(model, tokens)
    settings = CacheSettings(preset.sink_tokens, preset.recent_window, preset.flush_block, preset.pre_rope)
    if captured is not None:
        _check_captured(captured, model, tokens, preset)
        batch_size = captured.batch_size
    current().share(tokens.split(batch_size)[-1])  # the smallest batch
    progress = progress and current().first
    notes = {"arguments": preset.arguments, "tokens": tokens.numel(), "batch_size": batch_size}
    if checkpoint is None:
        found = _fit(model, tokens, preset, batch_size, progress, captured, None)
        return Compressor(preset.name, found[0], settings, describe(model), notes, found[1])
    with Checkpoint(checkpoint, _job(model, tokens, preset, batch_size)).alone() as steps:
        if (steps.folder / DONE).is_dir():
            return _finished(steps)
        found = _fit(model, tokens, preset, batch_size, progress, captured, steps)
        compressor = Compressor(preset.name, found[0], settings, describe(model), notes, found[1])
        _finish(steps, compressor)
    return compressor


def _fit(model, tokens, preset: Preset, batch_size, progress, captured, steps: Checkpoint | None) -> tuple[list, dict]:
    """Every layer's codecs, and the predictions by place."""
    if preset.plan is None:
        return _fit_codecs(model, tokens, preset, batch_size, progress, captured, steps), {}
    made = captured or _capture(model, tokens, preset, batch_size, progress, steps)
    with nullcontext(made) if made is captured else made:
        return fit_layers(preset, made, ModelTrial(model, made), model.device, progress, steps)


def _job(model, tokens: Tensor, preset: Preset, batch_size: int) -> dict:
    """What a checkpoint must have been made for. The number of processes counts too: sums are rounded differently, and
    each keeps its own share of keys and values."""
    return {
        "job": "calibrate",
        "preset": preset.describe(describe(model)["head_dim"]),
        "model": weights_fingerprint(model),
        "tokens": [list(tokens.shape), fingerprint(tokens)],
        "batch_size": batch_size,
        "processes": current().count,
    }


def _capture(model, tokens, preset: Preset, batch_size, progress, steps: Checkpoint | None) -> CapturedTokens:
    if steps is not None:
        steps.begin()  # keys and values alone do not say whose they are
    folder = None if steps is None else _spill_folder(steps, "captured")
    return CapturedTokens(model, tokens, batch_size, not preset.pre_rope, folder, progress, keep=folder is not None)


def _spill_folder(steps: Checkpoint, name: str) -> Path:
    return steps.folder / f"process-{current().rank}" / name


def _finished(steps: Checkpoint) -> Compressor:
    try:
        return Compressor.from_pretrained(steps.folder / DONE)
    except FormatError as error:
        raise FormatError(f"{error}: delete {steps.folder} to calibrate anew") from error


def _finish(steps: Checkpoint, compressor: Compressor) -> None:
    """Keep the result, and drop keys and values."""
    current().wait()
    shutil.rmtree(_spill_folder(steps, "captured").parent, ignore_errors=True)
    if current().first:
        compressor.save_pretrained(steps.folder / PART)
        os.replace(steps.folder / PART, steps.folder / DONE)
    current().wait()


def _fit_codecs(model, tokens, preset: Preset, batch_size, progress, captured, steps) -> list[tuple[Codec, Codec]]:
    """Every layer's codecs in one pass, or from one batch where there is nothing to learn: none depends on another."""
    about = describe(model)
    codecs = [
        (preset.key_codec(about["head_dim"]), preset.value_codec(about["head_dim"])) for _ in range(about["num_layers"])
    ]
    _tell_costs(model, tokens, preset, codecs)
    batches = captured.tokens.split(captured.batch_size) if captured else tokens.split(batch_size)
    if not any(codec.learns for codec in codecs[0]):
        batches = batches[:1]
    done = _learned_so_far(model, codecs, steps)
    bar = tqdm(batches, desc=f"calibrate {preset.name}", unit="batch", disable=None if progress else True)
    for number, batch in enumerate(bar):
        if number < done:
            continue
        if captured:
            keys, values = captured.layers(number, model.device)
        else:
            keys, values = capture(model, current().share(batch), post_rope=not preset.pre_rope)
        exact = [x for layer in zip(keys, values, strict=True) for x in layer]
        unready = [(codec, x) for codec, x in zip(chain(*codecs), exact, strict=True) if not codec.ready]
        if number == 0 and current().count > 1:
            _start_together(unready)
        else:
            for codec, x in unready:
                codec.partial_fit(x)
        if steps is not None and current().first:
            steps.save("codecs", collected(_named(codecs)), batches=number + 1)
    for pair in codecs:
        for codec in pair:
            codec.finalize()
    return codecs


def _tell_costs(model, tokens: Tensor, preset: Preset, codecs: list[tuple[Codec, Codec]]) -> None:
    """Tell those codecs that weigh errors what these cost."""
    if any(codec.weighted for codec in chain(*codecs)):
        found = metrics(model, tokens, not preset.pre_rope)
        for layer, pair in enumerate(codecs):
            for role, codec in zip(ROLES, pair, strict=True):
                codec.weigh(found[role, layer])


def _start_together(unready: list[tuple[Codec, Tensor]]) -> None:
    """The first batch, which initialises codebooks: each codec sees all processes' tokens in one process, and the
    others take over what it has learned. So k-means runs for as many codecs at a time as there are processes."""
    processes, whole = current(), {}
    for number, (_, x) in enumerate(unready):  # all together, before any of them begins to compute
        gathered = processes.rows(x)
        if number % processes.count == processes.rank:
            whole[number] = gathered
    for number, x in whole.items():
        with alone():
            unready[number][0].partial_fit(x)
    named = {number: (str(number), codec) for number, (codec, _) in enumerate(unready)}
    learned = {name: tensor.cpu() for name, tensor in collected(named[number] for number in whole).items()}
    devices = {str(number): x.device for number, (_, x) in enumerate(unready)}
    for rank, message in enumerate(processes.exchange(save(learned))):
        if rank != processes.rank:
            theirs = (named[number] for number in range(rank, len(unready), processes.count))
            hand_out(load(message), theirs, devices)


def _named(codecs: list[tuple[Codec, Codec]]) -> list[tuple[str, Codec]]:
    return [
        (f"{layer}.{role}", codec) for layer, pair in enumerate(codecs) for role, codec in zip(ROLES, pair, strict=True)
    ]


def _learned_so_far(model, codecs: list[tuple[Codec, Codec]], steps: Checkpoint | None) -> int:
    """Batches that the codecs need not see again, after they have been brought to where they were."""
    if steps is None or (found := steps.load_together("codecs")) is None:
        return 0
    tensors, notes = found
    devices = {f"{layer}.{role}": device for layer, device in enumerate(layer_devices(model)) for role in ROLES}
    hand_out(tensors, _named(codecs), devices)
    return notes["batches"]


def _check_captured(captured: CapturedTokens, model, tokens: Tensor, preset: Preset) -> None:
    if not isinstance(captured, CapturedTokens):
        raise DataError(f"captured must be CapturedTokens(model, tokens, ...), not {type(captured).__name__}")
    if captured.processes != current():
        raise DataError(f"captured by {captured.processes}, but this is {current()}: capture where you calibrate")
    if not torch.equal(captured.tokens, tokens) or captured.post_rope == preset.pre_rope:
        raise DataError("captured holds other tokens, or keys on the other side of RoPE: capture them for this preset")
    found = difference(captured.about, model) or (captured.dtype != model.dtype and f"{captured.dtype}")
    found = found or (captured.weights != weights_fingerprint(model) and "other weights")
    if found:
        raise DataError(f"captured is of a model with {found}: capture the tokens with this one")
