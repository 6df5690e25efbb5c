"""The model of lm_eval answers what the model answers when it reads that cache; suites, on data of the real layout;
facts hidden in text."""

import json
from functools import cache

import datasets
import leaderboard_data
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._index import TaskIndex
from small_models import COMMON, load
from transformers import LlamaConfig
from typer.testing import CliRunner

import vqkv
from vqkv import DataError, FormatError, UnknownNameError, calibrate, load_model, presets
from vqkv.cache.meter import total
from vqkv.cli import app
from vqkv.evaluation.harness import LOCAL, PROTOCOLS, SUITES, CompressedLM, cli_evaluate, run_tasks
from vqkv.evaluation.questions import DIGITS, all_right, facts_batch, recall_questions
from vqkv.models.load import values_per_token
from vqkv.study.peers import TransformersQuantized

PRESETS = {
    "vqllm": presets.vqllm(num_quantizers=2, codebook_size=16, group_size=16),
    "kivi": presets.kivi(bits=2, block_tokens=16, recent_window=16),  # packs blocks of tokens
    # layers read each other; sinks and a window
    "aqua": presets.aqua(presets.quanto(bits=2, group_size=32), recent_window=8),
}
FOLDERS = ("arc", "gsm8k", "hellaswag", "longbench", "mmlu/default", "ruler", "truthfulqa", "wikitext", "winogrande")
LENGTHS = [(5, 3), (41, 9), (70, 1), (33, 33), (64, 1), (20, 50)]  # (context, continuation)


@pytest.fixture(autouse=True)
def few_files(monkeypatch):
    """Spare lm_eval the definitions of 14,000 other tasks, and what it reports of the machine."""

    def files(root):
        return [file for folder in FOLDERS for file in sorted(root.joinpath(folder).glob("**/*.yaml"))]

    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", files)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In fp64: in fp32, rounding that depends on the shape of a batch now and then turns a code over."""
    return load("llama", tmp_path_factory.mktemp("llama")).double()


def tokens(shape, seed=0):
    return torch.randint(1, 4096, shape, generator=torch.Generator().manual_seed(seed))


@cache
def compressor(model, name):
    return calibrate(model, tokens((16, 128)), PRESETS[name], progress=False)


ASKED = [  # contexts of several lengths, each with three continuations, two of them as long as each other
    (None, tokens((context,), 1 + number).tolist(), tokens((length + extra,), 100 * number + choice).tolist())
    for number, (context, length) in enumerate(LENGTHS)
    for choice, extra in enumerate((0, 0, 2))
]


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


# The model


def test_uncompressed_is_hflm(mini):
    model, tokenizer = mini
    (asked,) = recall_questions(tokenizer, 16, 1)
    scored = [Instance("loglikelihood", {}, (asked["context"], choice), 0) for choice in asked["choices"]]
    continued = [Instance("generate_until", {}, (asked["context"], {"until": ["\n"], "max_gen_toks": 8}), 0)]
    theirs, ours = HFLM(model, tokenizer=tokenizer, batch_size=1), CompressedLM(model, tokenizer)
    assert ours.loglikelihood(scored) == theirs.loglikelihood(scored)
    assert ours.generate_until(continued) == theirs.generate_until(continued) and ours.measured() == {}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", [*PRESETS, "peer"])
def test_answers_are_those_of_each_text_alone(model, tokenizer, name, protocol):
    peer = TransformersQuantized("hqq", nbits=4, q_group_size=16, residual_length=16, axis_key=1)
    fitted = peer if name == "peer" else compressor(model, name)
    if (name, protocol) == ("peer", "in_place"):
        with pytest.raises(DataError, match="in-place"):
            CompressedLM(model, tokenizer, fitted, protocol)
        return
    lm = CompressedLM(model, tokenizer, fitted, protocol)
    expected = torch.tensor([by_hand(model, fitted, protocol, *pair) for _, *pair in ASKED], dtype=torch.float64)
    torch.testing.assert_close(answers(lm, ASKED), expected, atol=1e-9, rtol=1e-6)  # processors sum in other orders
    uncompressed = answers(CompressedLM(model, tokenizer, None, protocol), ASKED)
    assert (uncompressed - expected).abs().max() > 1e-4  # the cache was read
    assert {each.batch_size for each in lm.reports} == {1}


def test_a_prompt_goes_in_by_pieces(model, tokenizer):
    fitted, prompt = compressor(model, "vqllm"), tokens((1, 70))
    cache = fitted.new_cache(model)
    with torch.no_grad():
        for piece in prompt.split(32, dim=1):
            logits = model(piece, past_key_values=cache, use_cache=True).logits[:, -1]
    lm = CompressedLM(model, tokenizer, fitted)
    out = lm._model_generate(prompt, 71, [], attention_mask=torch.ones_like(prompt))
    assert out.shape == (1, 71) and out[0, :70].equal(prompt[0]) and out[0, -1] == logits.argmax()
    assert total(lm.reports).values == 70 * values_per_token(fitted.model)


# The tasks


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model with room for 25 examples, its tokenizer and a compressor."""
    folder = tmp_path_factory.mktemp("llama")
    model = load("llama", folder, config=LlamaConfig(**COMMON | {"max_position_embeddings": 4096}))
    return model, load_model(str(folder))[1], compressor(model, "vqllm")


@pytest.fixture
def leaderboard(tmp_path, monkeypatch):
    """Where the tasks find small data sets in the layout of theirs."""
    leaderboard_data.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")


def test_the_real_leaderboard_tasks(small, leaderboard, monkeypatch):
    shots = SUITES["old-leaderboard"] | {"mmlu_anatomy": 5}
    del shots["mmlu"]  # a group of 57 of these
    monkeypatch.setitem(SUITES, "small", shots)
    rows = {row["task"]: row for row in run_tasks(*small, ["small", "wikitext"], limit=1, max_length=1300)}
    assert {task: row["num_fewshot"] for task, row in rows.items()} == shots | {"wikitext": 0}
    assert all({"acc,none", "acc_norm,none"} <= rows[task].keys() for task in ("arc_challenge", "hellaswag"))
    assert {"exact_match,strict-match", "exact_match,flexible-extract"} <= rows["gsm8k"].keys()
    assert {"word_perplexity,none", "bits_per_byte,none"} <= rows["wikitext"].keys()
    assert all(row["n"] == 1 and row["bits_per_value"] == pytest.approx(1) for row in rows.values())
    assert all(row["packed_share"] > 0.4 for row in rows.values()) and rows["hellaswag"]["packed_share"] < 1


def test_bad_arguments_are_named(small, mini):
    one, tokenizer, fitted = small
    for arguments, error, message in (
        ((one, tokenizer, None, "local", 1, "snapshot"), UnknownNameError, "in_place"),
        ((*mini, fitted), FormatError, "fitted to"),
        ((*small, [*SUITES, "arc_chalenge"]), UnknownNameError, "'arc_chalenge'. Did you mean 'arc_challenge'"),
        ((*small, "hellaswag", 1), DataError, r"'hellaswag': .*Rowan/hellaswag.*hf download"),
    ):
        with pytest.raises(error, match=message) as raised:
            run_tasks(*arguments)
        assert len(str(raised.value)) < 450
    assert len(SUITES["longbench"]) == 14 and len(SUITES["old-leaderboard"]) == 6


def test_tasks_command_gives_the_same_rows_each_time(small, tmp_path):
    model, _, fitted = small
    fitted.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["evaluate", model.vqkv_name, str(tmp_path), "-t", "local", "--limit", "1"])
    rows = json.loads(result.stdout)
    assert rows == run_tasks(*load_model(model.vqkv_name), fitted, limit=1)
    assert {row["task"] for row in rows} == LOCAL.keys()
    for row in rows:
        assert row["n"] == 1 and 0 <= row["acc,none"] <= 1 and row["num_fewshot"] == 0 and row["bits_per_value"] == 1


def test_lm_evals_own_command_line(small, leaderboard, tmp_path, monkeypatch):
    model, _, fitted = small
    fitted.save_pretrained("compressor")
    command = ["lm_eval", "--model", "vqkv", "--model_args", f"pretrained={model.vqkv_name},compressor=compressor"]
    monkeypatch.setattr("sys.argv", [*command, "--tasks", "winogrande", "--limit", "2", "--output_path", "out"])
    cli_evaluate()
    (out,) = (tmp_path / "out").rglob("*.json")
    assert 0 <= json.loads(out.read_text())["results"]["winogrande"]["acc,none"] <= 1


@pytest.mark.parametrize("distance", [16, 64, 256])
def test_values_stand_at_their_distance(tokenizer, distance):
    back = 3 * round(distance / 3)  # lines of a key, its value and a newline
    for row in recall_questions(tokenizer, distance, 20):
        ids = tokenizer(row["context"] + row["choices"][row["answer"]])["input_ids"]
        assert ids[-2:] == ids[-2 - back : -back] and ids[:-1].count(ids[-1]) - ids[:-1:3].count(ids[-1]) == 1
        assert len(ids) <= 1024
        assert len(set(row["choices"])) == 4 and all(row["context"].count(f"{x}\n") == 1 for x in row["choices"])


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def text(tokenizer):
    return vqkv.load_corpus("python", tokenizer, "validation", 900, 3, seed=1)


@pytest.mark.parametrize(("count", "template"), [(1, None), (3, CHAT), (9, None)])
def test_answers_stand_in_the_text(tokenizer, text, count, template, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    batch = facts_batch(tokenizer, count, text, 500, seed=5)
    assert batch.tokens.shape == batch.question.shape and not batch.question[:, :500].any() and batch.text_len == 500
    for tokens, question in zip(batch.tokens, batch.question):
        assert sorted(question[question > 0].unique().tolist()) == list(range(1, count + 1))
        for number in range(1, count + 1):
            at = (question == number).nonzero().flatten()
            answer = tokenizer.decode(tokens[at]).strip()
            assert len(answer) == DIGITS and answer.isdigit()
            stem = tokenizer.decode(tokens[:500]).partition(f" {answer}.")[0].rpartition("\n\n")[2]
            assert stem.startswith("The ") and stem.endswith(" is") and "\n" not in stem
            assert tokenizer.decode(tokens[: at[0]]).endswith(stem)  # what the answer goes on from
            assert tokenizer.decode(tokens).count(answer) == 2
    assert ("<assistant>" in tokenizer.decode(batch.tokens[0])) == (template is not None)


def test_the_same_seed_hides_the_same_facts_where_they_have_room(tokenizer, text):
    first, again, other = (facts_batch(tokenizer, 4, text, 500, seed) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens) and not torch.equal(first.tokens, other.tokens)
    with pytest.raises(DataError, match="8 facts take [0-9]+ of 120 tokens: hide fewer"):
        facts_batch(tokenizer, 8, text, 120, seed=0)


def test_an_answer_is_right_where_all_its_tokens_are(tokenizer, text):
    batch = facts_batch(tokenizer, 3, text, 600, seed=0)
    right = torch.ones(int((batch.question > 0).sum()))
    assert all_right(batch, right).all() and all_right(batch, right).shape == (3, 3)
    marked = (batch.question > 0).nonzero()
    wrong = next(i for i, (row, column) in enumerate(marked) if row == 1 and batch.question[row, column] == 2)
    right[wrong] = 0
    assert all_right(batch, right).tolist() == [[True] * 3, [True, False, True], [True] * 3]
