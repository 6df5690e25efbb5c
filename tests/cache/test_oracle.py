"""Whatever is done to a cache, it holds what a plain list of tokens holds to which the same codecs were applied."""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import Fp32
from transformers import AutoModelForCausalLM, LlamaConfig

from vqkv import CompressedCache, calibrate, presets
from vqkv.cache.compressor import Compressor
from vqkv.cache.settings import CacheSettings
from vqkv.codecs.payload import Payload
from vqkv.codecs.predictive import Reconstructions
from vqkv.errors import DataError
from vqkv.kernels.rope import rotate, unrotate
from vqkv.models.load import describe
from vqkv.models.rope import rotations

LAYERS, HEADS, HEAD_DIM = 2, 2, 8
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
CODECS = {  # a preset, and sinks, window, flush block, pre-RoPE: with and without each
    "quanto": (presets.quanto(4, 8), CacheSettings(0, 0, 1, False)),
    "vqllm": (presets.vqllm(2, 8, 4), CacheSettings(1, 2, 3, True)),
    "kivi": (presets.kivi(2, 4, recent_window=0), CacheSettings(2, 0, 1, False)),
    "vqq": (presets.vqq(0.2, 4, 8), CacheSettings(0, 3, 1, True)),
    "aqua": (presets.aqua(presets.quanto(4, 8), first_layer_bits=16), CacheSettings(1, 1, 2, True)),
}


@dataclass
class Token:
    """One token of one sequence: keys and values as they came, as they are read, and where they are kept."""

    given: list  # by layer: (keys, values), each (num_kv_heads, head_dim)
    read: list
    part: str
    position: int


NOTHING = [(torch.zeros(HEADS, HEAD_DIM),) * 2] * LAYERS


class Oracle:
    """A list of slots for each sequence; None is padding."""

    def __init__(self, compressor, rotation):
        self.compressor, self.rotation = compressor, rotation if compressor.settings.pre_rope else None
        self.rows = None

    def update(self, states, real):
        """What attention should read of every layer: (keys, values), padding as zeros."""
        shown, self.rows = [], self.rows or [[] for _ in real]
        for b, row in enumerate(self.rows):
            position = sum(t is not None for t in row)
            for i, holds_token in enumerate(real[b]):
                position += int(holds_token)
                given = [tuple(x[b, :, i] for x in pair) for pair in states]
                row.append(Token(given, given, "new", position) if holds_token else None)
            shown.append([NOTHING if t is None else t.read for t in row])
            self._settle([t for t in row if t is not None])
        return [
            tuple(torch.stack([torch.stack([t[layer][role] for t in row], 1) for row in shown]) for role in (0, 1))
            for layer in range(LAYERS)
        ]

    def _settle(self, tokens):
        held, rows = self.compressor.settings, self.compressor.block_tokens
        sinks = sum(t.part == "sink" for t in tokens)
        for t in tokens:
            if t.part == "new" and sinks < held.sink_tokens:
                t.part, t.read, sinks = "sink", halved(t.given), sinks + 1
        window = [t for t in tokens if t.part in ("window", "new")]
        block = torch.tensor(rows).lcm(torch.tensor(held.block_tokens)).item()
        spare = max(0, len(window) - held.recent_window)
        flush = spare - spare % block
        if flush:
            self._pack(window[:flush])
        for t in window[flush:]:
            t.part, t.read = "window", halved(t.given)

    def _pack(self, tokens):
        reconstructions = Reconstructions(self.compressor.last_readers)
        read = [[None, None] for _ in range(LAYERS)]
        for layer in range(LAYERS):
            for role in (0, 1):
                x = torch.stack([self._waited(t)[layer][role] for t in tokens], 1)[None]
                x = self._rotated(unrotate, x, tokens) if role == 0 else x
                x = self.compressor.coders[layer][role].through(x, reconstructions)
                read[layer][role] = self._rotated(rotate, x, tokens) if role == 0 else x
        for i, t in enumerate(tokens):
            t.part, t.read = "packed", [tuple(x[0, :, i] for x in pair) for pair in read]

    def _waited(self, token):
        """In 16 bits where tokens can wait in the window, whether this one did or not."""
        held, rows = self.compressor.settings, self.compressor.block_tokens
        return halved(token.given) if held.recent_window or rows * held.block_tokens > 1 else token.given

    def _rotated(self, apply, x, tokens):
        if self.rotation is None:
            return x
        return apply(x, *self.rotation.table(torch.tensor([[t.position for t in tokens]])))

    def crop(self, count):
        self.rows = [row[: len(row) - count] for row in self.rows]
        if not self.rows[0]:
            self.rows = None

    def select(self, index):
        self.rows = [copy.deepcopy(self.rows[i]) for i in index]

    def count(self, part):
        return sum(t is not None and t.part == part for row in self.rows or [] for t in row)


def halved(given):
    return [tuple(x.half().float() for x in pair) for pair in given]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, head_dim=HEAD_DIM, num_key_value_heads=HEADS, **SHAPE)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.vqkv_name = "oracle"
    return model


@pytest.fixture(scope="module", params=sorted(CODECS))
def compressor(request, model):
    tokens = torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(2))
    preset, held = CODECS[request.param]
    fitted = calibrate(model, tokens, preset, progress=False)
    for prediction in fitted.predictions.values():
        sum_in_float64(prediction.predictor)
    return Compressor(fitted.name, fitted.codecs, held, fitted.model, predictions=fitted.predictions)


def sum_in_float64(predictor):
    """The last bit of a float32 sum depends on how many tokens are multiplied together; where a value lies between two
    codes, or a scale between two fp16 numbers, the cache and the oracle would store different ones."""
    weight, bias = predictor.weight.double(), predictor.bias.double()
    predictor._predict = lambda x: (x.double() @ weight + bias).float()


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 7), st.sampled_from(["none", "left", "right", "any"])),
    st.tuples(st.just("update"), st.just(1), st.just("none")),
    st.tuples(st.just("crop"), st.integers(0, 9)),
    st.tuples(st.just("reorder"), st.randoms(use_true_random=False)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.randoms(use_true_random=False)),
    st.tuples(st.just("save")),
    st.tuples(st.just("reset")),
)


# What random operations seldom do: KIVI's blocks are cut, and once more across what was cut, or where they are decoded.
EIGHT, ONE = ("update", 8, "none"), ("update", 1, "none")
CUT_TWICE = [EIGHT, ("crop", 4), EIGHT, ("crop", 7), ONE, ONE]
CUT_DECODED = [EIGHT, EIGHT, ONE, ("crop", 9), EIGHT, ONE]


def feed(cache, oracle, generator, new_tokens, padding, batch):
    """One forward pass without the model around it: random keys and values come."""
    real = torch.ones(batch, new_tokens, dtype=torch.bool)
    for row in real if padding != "none" else ():
        count = int(torch.randint(0, new_tokens + 1, (1,), generator=generator))
        row[: new_tokens - count if padding == "left" else 0] = False
        if padding == "right":
            row[count:] = False
        if padding == "any":
            row &= torch.rand(new_tokens, generator=generator) < 0.6
    old = [[t is not None for t in row] for row in oracle.rows or [[]] * batch]
    mask = torch.cat([torch.tensor(old, dtype=torch.bool).view(batch, -1), real], dim=1)
    cache.expect(mask.long(), mask.long().cumsum(1)[:, -new_tokens:])  # the first token of a sequence is at 1
    shape = batch, HEADS, new_tokens, HEAD_DIM
    states = [tuple(torch.randn(shape, generator=generator) for _ in "kv") for _ in range(LAYERS)]
    for layer, expected in enumerate(oracle.update(states, real)):
        for ours, theirs in zip(cache.update(*states[layer], layer), expected, strict=True):
            shown = mask[:, None, :, None].expand_as(ours)
            torch.testing.assert_close(ours * shown, theirs, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=150)
@given(
    operations=st.lists(OPERATIONS, min_size=2, max_size=9),
    batch=st.integers(1, 3),
    budget=st.sampled_from([0, 700, 10**6]),
    seed=st.integers(0, 9),
)
@example(operations=CUT_TWICE, batch=1, budget=700, seed=0)
@example(operations=CUT_DECODED, batch=1, budget=10**6, seed=0)
def test_a_cache_holds_what_a_plain_list_holds(tmp_path_factory, model, compressor, operations, batch, budget, seed):
    cache, oracle = compressor.new_cache(model, decoded_cache_bytes=budget), Oracle(compressor, rotations(model)[0])
    generator = torch.Generator().manual_seed(seed)
    for name, *arguments in operations:
        if name == "update":
            feed(cache, oracle, generator, *arguments, batch)
        elif name == "reset":
            cache.reset()
            oracle.rows = None
        elif oracle.rows is None:
            continue
        elif name == "crop":
            cache.crop(-arguments[0])
            oracle.crop(min(arguments[0], len(oracle.rows[0])))
        elif name == "save":
            path = tmp_path_factory.getbasetemp() / "cache.safetensors"
            cache.save(path)
            cache = CompressedCache.load(path, compressor, model, decoded_cache_bytes=budget)
        elif name == "repeat":
            cache.batch_repeat_interleave(arguments[0])
            oracle.select([i for i in range(batch) for _ in range(arguments[0])])
        else:
            index = [
                arguments[0].randrange(batch)
                for _ in range(batch if name == "reorder" else arguments[0].randint(1, batch))
            ]
            (cache.reorder_cache if name == "reorder" else cache.batch_select_indices)(torch.tensor(index))
            oracle.select(index)
        batch = len(oracle.rows) if oracle.rows else batch
        report, token = cache.report(), 2 * LAYERS * HEADS * HEAD_DIM
        assert cache.get_seq_length() == (len(oracle.rows[0]) if oracle.rows else 0)
        assert report.packed_values == oracle.count("packed") * token
        assert report.kinds["sinks"] == oracle.count("sink") * token * 2
        assert report.kinds["window"] == oracle.count("window") * token * 2
        assert report.kinds["decoded"] <= budget


class Blocks(Fp32):
    """Stores four tokens in a row, as they are."""

    block_tokens = 4

    def _encode(self, x):
        return Payload({"values": x.unflatten(2, (-1, 4))}, 4)

    def _decode(self, payload):
        return payload.fields["values"].flatten(2, 3)


@settings(deadline=None, max_examples=80)
@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=2, max_size=12),
    codec=st.sampled_from([Fp32, Blocks]),
    held=st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 3), st.booleans()),
    recording=st.booleans(),
    budget=st.sampled_from([0, 700, 10**6]),
)
def test_a_window_that_slides_reads_what_a_plain_list_holds(model, codec, held, steps, recording, budget):
    """Guesses of a pass are taken back while blocks are dropped; unrecorded ones, where enough is left of the past."""
    sinks, window, block, pre_rope = held
    settings = CacheSettings(sinks, window, block, pre_rope)
    compressor = Compressor("exact", [(codec(), codec())] * LAYERS, settings, describe(model))
    cache, reach = compressor.new_cache(model, decoded_cache_bytes=budget), 5
    generator = torch.Generator().manual_seed(0)
    cache.batch.reaches, complete = [reach, None], [torch.zeros(1, HEADS, 0, HEAD_DIM)] * (2 * LAYERS)
    if recording:
        cache.activate_past_recording()
    for new, removed in steps:
        cache.expect(None, None)
        for layer in range(LAYERS):
            pair = [torch.randn(1, HEADS, new, HEAD_DIM, generator=generator) for _ in "kv"]
            for role, x in enumerate(pair):
                complete[2 * layer + role] = torch.cat([complete[2 * layer + role], x], dim=2)
            first = cache.layers[layer].first
            for states, x in zip(cache.update(*pair, layer), complete[2 * layer :], strict=False):
                torch.testing.assert_close(states, x[:, :, first:], rtol=1e-2, atol=1e-2)
        left, first = complete[0].shape[2] - min(removed, new), cache.layers[0].first
        if not recording and first and left - first < reach:
            with pytest.raises(DataError, match="sliding window or a recurrent state has forgotten"):
                cache.crop(left - complete[0].shape[2])
            continue
        cache.crop(left - complete[0].shape[2])
        complete = [x[:, :, :left] for x in complete]
        kept, rows = sum(cache.layers[0].stores[0].parts) if left else 0, cache.settings.block_tokens
        assert min(reach, left) <= kept <= max(reach, window + rows) + rows + sinks and cache.get_seq_length() == left
