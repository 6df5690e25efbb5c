"""The model of lm_eval answers what the model answers when it reads that cache, whatever shares its batch."""

import math
from functools import cache

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from small_models import load
from transformers import AutoTokenizer

from vqkv import presets
from vqkv.cache.meter import total
from vqkv.calibration.calibrate import calibrate
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.evaluation.harness import VqkvLM, entries, run_tasks
from vqkv.evaluation.harness.model import PROTOCOLS, Tally
from vqkv.evaluation.harness.tasks import manager
from vqkv.models.load import load_model, values_per_token
from vqkv.study.peers import TransformersQuantized

ROUNDED = {"atol": 1e-9, "rtol": 1e-6}  # fp32, which some processors sum differently in larger batches
PRESETS = {
    "vqllm": presets.vqllm(num_quantizers=2, codebook_size=16, group_size=16),
    "kivi": presets.kivi(bits=2, group_size=16, recent_window=16),  # packs blocks of tokens
    "aqua": presets.aqua(
        presets.quanto(bits=2, group_size=32), recent_window=8
    ),  # layers read each other; sinks and a window
}
LENGTHS = [(5, 3), (40, 2), (41, 9), (70, 1), (33, 33), (12, 4), (64, 1), (20, 50)]  # (context, continuation)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, tmp_path_factory):
    """In fp64: in fp32, rounding that depends on the shape of a batch now and then turns a code over."""
    return load(request.param, tmp_path_factory.mktemp(request.param)).double()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(load_model("vqkv/llama-mini")[1].name_or_path)


def tokens(shape, seed=0):
    return torch.randint(1, 4096, shape, generator=torch.Generator().manual_seed(seed))


@cache
def compressor(model, name):
    return calibrate(model, tokens((16, 128)), PRESETS[name], progress=False)


def requests(seed=1):
    """Contexts of several lengths, each with three continuations, two of them as long as each other."""
    found = []
    for number, (context, length) in enumerate(LENGTHS):
        start = tokens((context,), seed + number).tolist()
        for choice, extra in enumerate((0, 0, 2)):
            found.append((None, start, tokens((length + extra,), 100 * number + choice).tolist()))
    return found


def answers(lm, asked):
    return torch.tensor([total for total, _ in lm._loglikelihood_tokens(asked, disable_tqdm=True)], dtype=torch.float64)


def by_hand(model, compressor, protocol, context, continuation, chunk=32):
    """One text alone, without padding."""
    text = torch.tensor([context + continuation])
    cache = compressor.new_cache(model, in_place=protocol == "in_place")
    pieces = [text[:, :-1]] if protocol == "in_place" else text[:, :-1].split(chunk, dim=1)
    with torch.no_grad():
        logits = torch.cat([model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces], dim=1)
    scores = logits.double().log_softmax(-1)[0, len(context) - 1 :]
    return scores.gather(1, torch.tensor(continuation)[:, None]).sum().item()


def documents(task, limit):
    """What lm_eval asks of a task's first documents."""
    (found,) = manager(task, {}).load([task])["tasks"].values()
    found.set_config("num_fewshot", 0)
    found.build_all_requests(limit=limit, rank=0, world_size=1)
    return found.instances


@pytest.mark.parametrize("name", ["vqkv/llama-mini", "vqkv/gpt2-mini"])
def test_uncompressed_is_hflm_on_the_local_tasks(name):
    model, tokenizer = load_model(name)
    asked = [instance for entry in entries("local") for instance in documents(entry.task, 1)]
    theirs = HFLM(model, tokenizer=tokenizer, batch_size=3)
    scored = [x for x in asked if x.request_type == "loglikelihood"]
    continued = [x for x in asked if x.request_type == "generate_until"]
    rolling = [Instance("loglikelihood_rolling", {}, (x.args[0],), 0) for x in scored[:2]]
    expected = theirs.loglikelihood(scored, disable_tqdm=True)
    written = theirs.generate_until(continued, disable_tqdm=True)
    whole = theirs.loglikelihood_rolling(rolling, disable_tqdm=True)
    for protocol in PROTOCOLS:
        ours = VqkvLM(model, None, protocol, tokenizer=tokenizer)
        found = ours.loglikelihood(scored, disable_tqdm=True)
        assert max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True)) < 1e-4
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert ours.generate_until(continued, disable_tqdm=True) == written
        pairs = zip(ours.loglikelihood_rolling(rolling), whole, strict=True)
        assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PRESETS)
def test_answers_are_those_of_each_text_alone(model, tokenizer, name, protocol):
    fitted, asked = compressor(model, name), requests()
    expected = torch.tensor([by_hand(model, fitted, protocol, *pair) for _, *pair in asked], dtype=torch.float64)
    lm = VqkvLM(model, fitted, protocol, tokenizer=tokenizer)
    torch.testing.assert_close(answers(lm, asked), expected, **ROUNDED)
    exact = answers(VqkvLM(model, None, protocol, tokenizer=tokenizer), asked)
    assert (exact - expected).abs().max() > 1e-4  # the cache was read
    assert {each.batch_size for each in lm.tally.reports} == {1}


def test_a_prompt_goes_in_by_pieces(model, tokenizer):
    fitted, prompt = compressor(model, "vqllm"), tokens((1, 70))
    cache = fitted.new_cache(model)
    with torch.no_grad():
        for piece in prompt.split(32, dim=1):
            logits = model(piece, past_key_values=cache, use_cache=True).logits[:, -1]
    lm = VqkvLM(model, fitted, tokenizer=tokenizer)
    out = lm._model_generate(prompt, 71, [], attention_mask=torch.ones_like(prompt))
    assert out.shape == (1, 71) and out[0, :70].equal(prompt[0]) and out[0, -1] == logits.argmax()
    assert total(lm.tally.reports).values == 70 * values_per_token(fitted.model)


def test_a_peer_reads_one_text_at_a_time(model, tokenizer):
    peer, asked = TransformersQuantized("hqq", nbits=4, q_group_size=16, residual_length=16, axis_key=1), requests()[:9]
    alone = torch.tensor([by_hand(model, peer, "chunked", *pair) for _, *pair in asked], dtype=torch.float64)
    lm = VqkvLM(model, peer, tokenizer=tokenizer)
    torch.testing.assert_close(answers(lm, asked), alone, **ROUNDED)
    assert {report.batch_size for report in lm.tally.reports} == {1}
    with pytest.raises(DataError, match="in-place"):
        VqkvLM(model, peer, "in_place", tokenizer=tokenizer)


def test_records_say_what_was_compressed_and_how_far(model, tokenizer):
    lm = VqkvLM(model, compressor(model, "vqllm"), tokenizer=tokenizer, max_length=60)
    answers(lm, requests())
    about = lm.get_model_info()
    assert about["compressor"] == "vqllm" and about["protocol"] == "chunked"
    assert about["bits_per_value"] == pytest.approx(2 * 4 / 16 + 16 / 32)
    assert 0 < about["packed_share"] < 1 and about["ratio"] > 10
    assert math.isnan(Tally().as_dict()["bits_per_value"])


def test_bytes_of_the_uncompressed_cache_are_those_it_has(model, tokenizer):
    lm = VqkvLM(model, tokenizer=tokenizer)
    answers(lm, requests())
    about = lm.tally.as_dict()
    assert (about["bits_per_value"], about["ratio"], about["packed_share"]) == (64, 0.25, 0)
    short = VqkvLM(model, compressor(model, "vqllm"), tokenizer=tokenizer)
    answers(short, [(None, [1, 2, 3], [4, 5])])
    assert short.tally.read == 4 and short.tally.read_packed == 0


def test_bad_arguments(model, tokenizer, tmp_path):
    fitted = compressor(model, "vqllm")
    for wrong, error, words in (
        ({"protocol": "snapshot"}, UnknownNameError, "in_place"),
        ({"chunk_size": 0}, DataError, "chunk_size 0"),
        ({"max_lenght": 5}, UnknownNameError, "max_length"),
        ({"compresor": "folder"}, UnknownNameError, "Did you mean 'compressor'"),
        ({"tokenizer": None}, DataError, "tokenizer"),
        ({"compressor": str(tmp_path)}, FormatError, "no vqkv-compressor"),
    ):
        with pytest.raises(error, match=words):
            VqkvLM(model, **{"compressor": fitted, "tokenizer": tokenizer} | wrong)
    with pytest.raises(FormatError, match="fitted to"):
        VqkvLM("vqkv/llama-mini", fitted)
    with pytest.raises(UnknownNameError, match="llama-mini"):
        VqkvLM("vqkv/lama-mini")


@pytest.mark.parametrize("count", [{"limit": 0}, {"limit": -3}, {"limit": "x"}, {"num_fewshot": -2}])
def test_counts_of_documents_and_shots(model, tokenizer, count):
    with pytest.raises(DataError, match=f"{next(iter(count))} .* must be an integer"):
        run_tasks(model, tokenizer, None, "vqkv_recall_16", **count)
