"""Notebook 14: one prompt, one vector and one system seen from within.

Every view is a table of plain literals' making, kept while the process lives, so that a control that is moved back
costs nothing. Systems keep no token exact here: what is seen is the codec's own work.
"""

import copy
import json
import math
import re
import warnings
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.stage import Quantizer
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.exact import RoundedCache
from vqkv.models.capture import check_tokens
from vqkv.models.metrics import token_kl
from vqkv.runtime.checks import check_whole, whole_blocks
from vqkv.study.experiments.common import bare, explained_by_layer, frame
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject

SYSTEMS: dict[str, Callable[[int], presets.Preset]] = {  # those that any number of BITS suits
    "quanto": presets.quanto,
    "hqq": presets.hqq,
    "kivi": presets.kivi,
    "kvquant": presets.kvquant,
    "turboquant": presets.turboquant,
    "higgs": presets.higgs,
    "aqua": lambda bits: presets.aqua(presets.higgs(bits)),
    "vqllm": lambda bits: presets.vqllm(4 * bits, 256),
    "best": lambda bits: presets.best(bits, context=1),
}
BITS = (2, 3, 4)
SHOWN = 32  # tokens of the prompt's end


@per_process(maxsize=16)
def fitted(preset: str, bits: int, subject: Subject) -> tuple[Compressor, str]:
    """A system of ``SYSTEMS`` with codes of ``bits`` bits a value, fitted on the subject's text, and what calibration
    warns of. Raises ``UnknownNameError`` for another system, ``DataError`` for bits not in ``BITS``."""
    if preset not in SYSTEMS:
        raise UnknownNameError("preset", preset, SYSTEMS)
    if bits not in BITS:
        raise DataError(f"{bits!r} bits: this page has {', '.join(map(str, BITS))}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compressor = subject.calibrated(bare(SYSTEMS[preset](bits)), subject.train_size[0])
    return compressor, " ".join(str(warning.message) for warning in said)


def prompt_tokens(subject: Subject, prompt: list) -> Tensor:
    """Tokens (1, length) of ``prompt``: a text, or [number, length] of a held-out sequence and how much of it."""
    if isinstance(prompt, str):
        return subject.tokenizer(prompt, return_tensors="pt")["input_ids"]
    number, length = prompt
    check_whole("number of the held-out sequence", number, 0, len(subject.test) - 1)
    check_whole("length of the prompt", length, 2, subject.test.shape[1])
    return subject.test[number : number + 1, :length]


def _readable(subject: Subject, compressor: Compressor, prompt, new_tokens: int = 0) -> Tensor:
    """The prompt on the model's device. Raises ``DataError`` where it is too short to pack, or too long."""
    tokens, block = prompt_tokens(subject, prompt), compressor.tokens_per_row
    if tokens.shape[1] <= block:
        raise DataError(
            f"{compressor.name} stores {block} token(s) together and reads the last one exact, but the prompt has "
            f"{tokens.shape[1]}: write a longer one"
        )
    check_tokens(subject.model, pad(tokens, (0, new_tokens)))
    return tokens.to(subject.model.device)


@per_process(maxsize=16)
def continuation(preset: str, bits: int, subject: Subject, prompt: str | list, new_tokens: int) -> pd.DataFrame:
    """A prompt's end (``position`` below 0) and its greedy continuation, a row per token; texts are JSON strings.

    ``exact``: what the model writes with its own cache; ``told``: its likeliest tokens with the compressed cache when
    it is given the exact ones before them; ``alone``: what it writes with that cache by itself. ``kl``: KL(exact ||
    compressed) in nats of the next token, given the exact ones before; ``kl_floor``: that of a cache in fp16.
    Every token reads the prompt packed, but for what does not fill a block. Raises ``DataError`` for a prompt that is
    too short to be packed.
    """
    compressor, _ = fitted(preset=preset, bits=bits, subject=subject)
    tokens, model = _readable(subject, compressor, prompt, new_tokens), subject.model
    expected, exact = _read(model, DynamicCache(config=model.config), tokens, new_tokens)
    logits, told = _read(model, compressor.new_cache(model), tokens, new_tokens, exact)
    rounded, _ = _read(model, RoundedCache(model, torch.float16), tokens, new_tokens, exact)
    _, alone = _read(model, compressor.new_cache(model), tokens, new_tokens)
    kls = {name: token_kl(expected, x)[0].tolist() for name, x in {"kl": logits, "kl_floor": rounded}.items()}
    begun = tokens[0].tolist()
    written = {name: x[0].tolist() for name, x in {"exact": exact, "told": told, "alone": alone}.items()}
    rows = []
    for position in range(-min(SHOWN, len(begun)), 0):
        text = _piece(subject.tokenizer, begun[:position], begun[position])
        rows.append({"position": position, "kl": math.nan, "kl_floor": math.nan} | dict.fromkeys(written, text))
    for position in range(new_tokens):
        row = {"position": position} | {name: kl[position] for name, kl in kls.items()}
        before = {name: begun + written["alone" if name == "alone" else "exact"][:position] for name in written}
        rows.append(row | {n: _piece(subject.tokenizer, before[n], ids[position]) for n, ids in written.items()})
    return frame(rows, subject.sources)


@torch.no_grad()
def _read(model, cache, prompt: Tensor, steps: int, told: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Read ``prompt`` (1, length) into ``cache``, its last token apart, so that all behind it reads what is stored;
    then go on for so many steps, each with its likeliest token or the one ``told`` (1, steps). Logits (1, steps,
    vocabulary) and likeliest tokens (1, steps)."""
    model(prompt[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    token, logits, likeliest = prompt[:, -1:], [], []
    for step in range(steps):
        logits.append(model(token, past_key_values=cache, use_cache=True).logits[:, -1:])
        likeliest.append(logits[-1].argmax(-1))
        token = likeliest[-1] if told is None else told[:, step : step + 1]
    return torch.cat(logits, 1), torch.cat(likeliest, 1)


def _piece(tokenizer, before: list[int], token: int) -> str:
    """What a token adds to the text of those before it, as JSON: it may be a space, or part of a character."""
    before = before[-SHOWN:]
    return json.dumps(tokenizer.decode([*before, token])[len(tokenizer.decode(before)) :])


@per_process(maxsize=16)
def stages(
    preset: str, bits: int, subject: Subject, prompt: str | list, layer: int, head: int, token: int
) -> pd.DataFrame:
    """One key of a prompt on its way through its codec, a row per ``stage`` and ``value``.

    ``as it comes``; what a prediction leaves, if there is one; then what every stage that changes values makes of it:
    all values that the key is read back from, which are those of other heads too where a stage mixes heads; the codes
    of these; and the key as it is read back, beside it as it came (``original``). ``text``: the token, as JSON. Raises
    ``DataError`` for a layer, head or token that is not there.
    """
    compressor, _ = fitted(preset=preset, bits=bits, subject=subject)
    tokens = _readable(subject, compressor, prompt)
    keys, values = subject.exact.keys_and_values(tokens, pre_rope=compressor.settings.pre_rope)
    check_whole("layer", layer, 0, len(keys) - 1)
    x, known = whole_blocks(keys[layer].float(), compressor.tokens_per_row), compressor.new_pass()
    for name, index, count in (("head", head, x.shape[1]), ("token", token, x.shape[2])):
        check_whole(name, index, 0, count - 1)
    for number in range(layer):
        compressor.reconstruct(number, keys[number], values[number], known)
    coder, at = compressor.coders[layer][0], (0, head, token)
    shown, left = {"as it comes": x[at]}, x
    if coder.prediction is not None:
        left = x - coder.prediction(known, x)
        shown["what the prediction leaves"] = left[at]
    steps, read_back = _through(coder.codec, left, at)
    shown |= steps | {"read back": read_back + x[at] - left[at]}
    ids = tokens[0].tolist()
    about = {"text": _piece(subject.tokenizer, ids[:token], ids[token])}
    rows = [
        about | {"stage": stage, "place": place, "value": value, "original": math.nan}
        for stage, line in shown.items()
        for place, value in enumerate(line.tolist())
    ]
    table = frame(rows, subject.sources)
    table.loc[table["stage"] == "read back", "original"] = x[at].tolist()
    return table


def _through(codec: Chain, x: Tensor, at: tuple[int, int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """What stages make of the vector ``x[at]`` by their names, its codes, and the vector as it is read back. A stage
    that only moves values is left out."""
    codec, x = copy.deepcopy(codec), x.clone()  # what inference mode has made has no gradient
    passed, steps, before = [], {}, x[at]
    for stage in codec.stages:
        x, side = stage.encode(x)
        passed.append((stage, side))
        places = _places(passed, x, at)
        if not torch.equal(x[places].sort().values, before.sort().values):
            steps[re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(stage).__name__).lower()] = x[places]
        before = x[places]
    places = _places(passed, x, at)
    steps["codes"] = _codes(codec.quantizer, x, places)
    return steps, _back(passed, codec.quantizer.quantize_dequantize(x))[at]


def _back(passed: list, y: Tensor) -> Tensor:
    y = y.clone()  # stages may write into what they are given
    for stage, side in reversed(passed):
        y = stage.decode(y, side)
    return y


def _places(passed: list, y: Tensor, at: tuple[int, int, int]) -> Tensor:
    """True where the vector ``at`` is read back from a value of ``y``: where its gradient is not 0."""
    y = y.detach().requires_grad_()
    vector = _back(passed, y)[at]
    weights = torch.rand(vector.shape, generator=torch.Generator().manual_seed(0)).to(vector) + 1  # none cancel
    return torch.autograd.grad((vector * weights).sum(), y)[0] != 0


def _codes(quantizer: Quantizer, y: Tensor, places: Tensor) -> Tensor:
    """Codes of the values at ``places``: of each, or of the few neighbours that share some."""
    codes = quantizer.encode(y)[0]
    groups = math.gcd(codes.shape[-1], places[0, 0, 0].numel())
    return codes.unflatten(-1, (groups, -1))[places.flatten(3).unflatten(-1, (groups, -1)).any(-1)].flatten()


@per_process(maxsize=16)
def explained(preset: str, bits: int, subject: Subject) -> pd.DataFrame:
    """EVR of what is stored of the subject's held-out text: a row per layer and role. Above 0, up to 1,
    what is read back tells more than each channel's mean; below 0 it does worse."""
    compressor, _ = fitted(preset=preset, bits=bits, subject=subject)
    evr = explained_by_layer(subject, compressor, subject.test)
    return frame(
        [{"layer": layer, "role": role, "evr": ratio} for (role, layer), ratio in evr.items()], subject.sources
    )
