"""Notebook 14: what compressed caches do to one conversation, one key and each layer, and controls to try others."""

import copy
import html
import json
import math
import os
import re

import ipywidgets
import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv import presets
from vqkv.cache.compressor import BUNDLED, Compressor
from vqkv.codecs.pipeline import Chain
from vqkv.errors import DataError
from vqkv.models.capture import check_tokens
from vqkv.models.metrics import token_kl
from vqkv.runtime.checks import check_whole, whole_blocks
from vqkv.study import figures, steering
from vqkv.study.chat import Conversation, turn_tokens
from vqkv.study.experiments.common import explained_by_layer, frame
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject

SYSTEMS = ("live", "best", "aqua", "higgs", "kivi", "kvquant", "turboquant", "hqq", "quanto")  # to choose from
CONTEXT = 32  # tokens before one, which its text may depend on


def fitted(system: str, subject: Subject) -> Compressor:
    """Return a preset's compressor: the package's, or fitted on the subject's text. Raises ``UnknownNameError``."""
    compressor = _fitted(system=system, subject=subject)
    subject.sources[f"compressor {system}"] = compressor.fingerprint[:16]
    return compressor


@per_process(maxsize=4)
def _fitted(system: str, subject: Subject) -> Compressor:
    ready = f"vqkv/{subject.name}-{system}"
    if ready in BUNDLED:
        return Compressor.from_pretrained(ready)
    return subject.calibrated(presets.make(system))


class Dialogue:
    """A conversation with a system's cache, next to an uncompressed cache that reads the same tokens."""

    def __init__(self, system: str, subject: Subject):
        self.system, self.subject, self.turns = system, subject, 0
        self.talk = Conversation(subject.model, subject.tokenizer, fitted(system, subject))
        self.uncompressed = DynamicCache(config=subject.model.config)

    @torch.no_grad()
    def turn(self, said: str, max_new_tokens: int) -> list[dict]:
        """Answer greedily. Returns a row for what is said and one for each token of the answer: ``kl`` in nats between
        the caches' predictions; ``uncompressed``, if it is the uncompressed cache's first choice; bytes afterwards."""
        how = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        made = self.talk.answer(said, max_new_tokens, **how)
        unread, length = made.sequences[:, self.uncompressed.get_seq_length() : -1], len(made.logits)
        read = self.talk.model(unread, past_key_values=self.uncompressed, use_cache=True, logits_to_keep=length)
        ids, kl = made.sequences[0].tolist(), token_kl(read.logits, torch.stack(made.logits, 1))[0].tolist()
        choices, begun = read.logits[0].argmax(-1).tolist(), len(ids) - length
        self.turns += 1
        about = {"system": self.system, "turn": self.turns, "tokens": len(ids)}
        about |= {"resident_bytes": self.talk.resident_bytes, "uncompressed_bytes": self.talk.uncompressed_bytes}
        rows = [about | {"role": "user", "text": json.dumps(said), "kl": math.nan, "uncompressed": True}]
        for position, choice in enumerate(choices):
            text = _piece(self.subject.tokenizer, ids[: begun + position], ids[begun + position])
            scored = {"kl": kl[position], "uncompressed": ids[begun + position] == choice}
            rows.append(about | {"role": "assistant", "text": text} | scored)
        return rows


def conversation(systems: list, subject: Subject, turns: list, max_new_tokens: int) -> pd.DataFrame:
    """Say the same ``turns``, texts or [number, length] of a passage, to each system: rows of ``Dialogue.turn``."""
    talks = [Dialogue(system, subject) for system in systems]
    said = [_text(subject, turn) for turn in turns]
    return frame([row for talk in talks for text in said for row in talk.turn(text, max_new_tokens)], subject.sources)


def _text(subject: Subject, turn: str | list) -> str:
    if isinstance(turn, str):
        return turn
    number, length = turn
    check_whole("number of the held-out sequence", number, 0, len(subject.test) - 1)
    check_whole("length of the passage", length, 1, subject.test.shape[1])
    return "Read this text.\n\n" + subject.tokenizer.decode(subject.test[number, :length], skip_special_tokens=True)


def _piece(tokenizer, before: list[int], token: int) -> str:
    """Return what a token adds to the text of those before it, as JSON: it may be a space, or part of a character."""
    before = before[-CONTEXT:]
    return json.dumps(tokenizer.decode([*before, token])[len(tokenizer.decode(before)) :])


def stages(systems: list, subject: Subject, turn: str | list, layer: int, head: int, token: int) -> pd.DataFrame:
    """Follow a key of a conversation's first turn through the codec of each system: a row per ``stage`` and ``value``.

    ``as it comes``; what a prediction leaves, if there is one; then what every stage that changes values makes of it:
    all values that the key is read back from, which are those of other heads too where a stage mixes heads; the codes
    of these; and the key as it is read back, next to it as it came (``original``). ``text``: the token, as JSON. Raises
    ``DataError`` for a layer, head or token that is not there, and for a turn that is too short to be packed.
    """
    tokens = turn_tokens(subject.tokenizer, _text(subject, turn))
    check_tokens(subject.model, tokens)
    ids, rows = tokens[0].tolist(), []
    for system in systems:
        original, shown = _stages(fitted(system, subject), subject, tokens, layer, head, token)
        about = {"system": system, "text": _piece(subject.tokenizer, ids[:token], ids[token])}
        for stage, line in shown.items():
            came = original.tolist() if stage == "read back" else [math.nan] * len(line)
            values = enumerate(zip(line.tolist(), came, strict=True))
            rows += [about | {"stage": stage, "place": i, "value": x, "original": y} for i, (x, y) in values]
    return frame(rows, subject.sources)


def _stages(compressor: Compressor, subject: Subject, tokens: Tensor, layer: int, head: int, token: int):
    """Return a key (head_dim,) as it comes, and what each stage makes of it."""
    block = compressor.block_tokens
    if tokens.shape[1] < block:
        raise DataError(f"{compressor.name} stores {block} tokens together, the turn has {tokens.shape[1]}: say more")
    tokens = tokens.to(subject.model.device)
    keys, values = subject.exact.keys_and_values(tokens, pre_rope=compressor.settings.pre_rope)
    check_whole("layer", layer, 0, len(keys) - 1)
    x, reconstructions = whole_blocks(keys[layer].float(), block), compressor.new_pass()
    for name, index, count in (("head", head, x.shape[1]), ("token", token, x.shape[2])):
        check_whole(name, index, 0, count - 1)
    for number in range(layer):
        compressor.reconstruct(number, keys[number], values[number], reconstructions)
    coder, at = compressor.coders[layer][0], (0, head, token)
    if compressor.joint or not isinstance(coder.codec, Chain):
        raise DataError(f"{compressor.name} has no stages that can be shown: choose another system")
    shown, left = {"as it comes": x[at]}, x
    if coder.prediction is not None:
        left = x - coder.prediction(reconstructions, x)
        shown["residual of the prediction"] = left[at]
    steps, read_back = _through(coder.codec, left, at)
    return x[at], shown | steps | {"read back": read_back + x[at] - left[at]}


def _through(codec: Chain, x: Tensor, at: tuple[int, int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """Return what stages make of the vector ``x[at]``, its codes, and the vector as read back; moves are left out."""
    codec, x = copy.deepcopy(codec), x.clone()  # what inference mode has made has no gradient
    passed, steps, before = [], {}, x[at]
    for stage in codec.stages:
        x, side = stage.encode(x)
        passed.append((stage, side))
        places = _places(passed, x, at)
        if not torch.equal(x[places].sort().values, before.sort().values):
            name = type(stage).__name__
            steps[name if name.isupper() else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()] = x[places]
        before = x[places]
    places = _places(passed, x, at)
    codes = codec.quantizer.encode(x)[0]
    groups = math.gcd(codes.shape[-1], places[0, 0, 0].numel())  # each value has a code, or a few neighbours share some
    coded = places.flatten(3).unflatten(-1, (groups, -1)).any(-1)
    steps["codes"] = codes.unflatten(-1, (groups, -1))[coded].flatten()
    return steps, _back(passed, codec.quantizer.quantize_dequantize(x))[at]


def _back(passed: list, y: Tensor) -> Tensor:
    y = y.clone()  # stages may write into what they are given
    for stage, side in reversed(passed):
        y = stage.decode(y, side)
    return y


def _places(passed: list, y: Tensor, at: tuple[int, int, int]) -> Tensor:
    """Return True where the vector ``at`` is read back from a value of ``y``: where its gradient is not 0."""
    y = y.detach().requires_grad_()
    vector = _back(passed, y)[at]
    weights = torch.rand(vector.shape, generator=torch.Generator().manual_seed(0)).to(vector) + 1  # none cancel
    return torch.autograd.grad((vector * weights).sum(), y)[0] != 0


def explained(systems: list, subject: Subject) -> pd.DataFrame:
    """Return EVR of what is stored of held-out text, a row per system, layer and role; 0 is each channel's mean."""
    rows = [
        {"system": system, "layer": layer, "role": role, "evr": ratio}
        for system in systems
        for (role, layer), ratio in explained_by_layer(subject, fitted(system, subject), subject.test).items()
    ]
    return frame(rows, subject.sources)


HEADLESS = "Open this page in JupyterLab and run it: a chat and controls appear here."
WIDE = ipywidgets.Layout(width="98%")


def chat(systems: list, subject: Subject, max_new_tokens: int):
    """Make a chat with ``systems`` side by side where a front end has opened the page; else print a line that says so.

    Jupyter's server names the page in ``JPY_SESSION_NAME``; papermill and ``vqkv.study`` do not.
    """
    return Chat(systems, subject, max_new_tokens).box if _opened() else print(HEADLESS)


def follow(systems: list, subject: Subject, turn: str, layer: int, head: int, token: int):
    """Draw the figures of one key of ``turn``, under controls that choose another; None where no front end is."""
    if not _opened():
        return None

    def show(turn: str, layer: int, head: int, token: int) -> None:
        try:
            figures.vector_stages(stages(systems, subject, turn, layer, head, token))
            plt.show()
        except DataError as error:
            print(error)

    numbers = {"layer": layer, "head": head, "token": token}
    moved = {name: ipywidgets.BoundedIntText(value, 0, 10**6, description=name) for name, value in numbers.items()}
    said = ipywidgets.Textarea(turn, description="first turn", continuous_update=False, layout=WIDE)
    return ipywidgets.interactive(show, turn=said, **moved)


def _opened() -> bool:
    return "JPY_SESSION_NAME" in os.environ and not steering.current.out


class Chat:
    """``box`` has a line to type in, the two systems, and what they answer; another system begins a conversation."""

    def __init__(self, systems: list, subject: Subject, max_new_tokens: int):
        self.subject, self.max_new_tokens = subject, max_new_tokens
        self.systems = [ipywidgets.Dropdown(options=SYSTEMS, value=system) for system in systems]
        self.prompt = ipywidgets.Text(placeholder="say something, then Enter", continuous_update=False, layout=WIDE)
        self.status, self.text = ipywidgets.HTML(), ipywidgets.HTML()
        self.box = ipywidgets.VBox([ipywidgets.HBox(self.systems), self.prompt, self.status, self.text])
        self.prompt.observe(self.say, "value")
        for control in self.systems:
            control.observe(self.begin, "value")
        self.begin()

    def begin(self, change=None) -> None:
        """Forget what was said."""
        self.talks: list[Dialogue] = []
        self.rows: list[dict] = []
        self.text.value = ""

    def say(self, change=None) -> None:
        """Have each system answer the prompt, and empty it."""
        said = self.prompt.value.strip()
        if not said:
            return
        self.status.value = "computing ..."
        try:
            self.talks = self.talks or [Dialogue(control.value, self.subject) for control in self.systems]
            for talk in self.talks:
                self.rows += talk.turn(said, self.max_new_tokens)
                self.text.value = figures.coloured_chat(pd.DataFrame(self.rows))
            self.status.value = self.prompt.value = ""
        except (ValueError, RuntimeError) as error:
            self.status.value = f"<b>{html.escape(str(error))}</b>"
