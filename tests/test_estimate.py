"""Estimates against what is really done: operations, bytes, and what a dry run says of it."""

import corpus_folders as folders
import pytest
import small_models
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from vqkv import DataError, configs, estimate, load_model, study
from vqkv.dry_run import DryRun
from vqkv.finetune import finetune
from vqkv.footprint import weight_bytes
from vqkv.meter import tensor_bytes
from vqkv.model_size import ModelSize, model_size
from vqkv.study import notebook_parameters
from vqkv.tables import repository_root

RATES = estimate.Rates(model=1e10, search=1e10, where="here", call_seconds=0.001)


def size_of(name: str, dtype: str = "float32") -> ModelSize:
    return model_size(name, configs.config_of(name)[0], dtype)


def parameters(page: str) -> dict:
    (path,) = repository_root().glob(f"notebooks/{page}*.ipynb")
    return notebook_parameters(path)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "qwen2", "mistral"])
def test_a_pass_has_the_operations_that_are_counted(name, tmp_path):
    folder = str(small_models.make(name, tmp_path))
    model, _ = load_model(folder)
    model.set_attn_implementation("eager")  # else its products are not counted on a CPU
    tokens = torch.zeros(3, 96, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(tokens, use_cache=False)
    size = size_of(folder)
    assert size.pass_flop(3, 96) == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert weight_bytes(size.model) == weight_bytes(model) and size.values == 2 * 3 * size.num_kv_heads * size.head_dim


def test_search_counts_every_code_of_every_stage():
    assert estimate._search(10, 256, 8, 32).search_flop == 10 * 256 * 8 * 32 * 2
    learned = estimate._kmeans(10**6, 256, 8, 32)
    assert learned.search_flop == 11 * 16 * 256 * 256 * 8 * 32 * 2  # 16 vectors a code, ten iterations and the codes


@pytest.mark.parametrize("page", ["01", "02", "03", "06"])
def test_more_work_is_estimated_to_take_longer(page):
    base, name = parameters(page), next(path for path in estimate.PAGES if path.startswith(page))
    size = size_of("vqkv/llama-mini")
    seconds = RATES.seconds(estimate.page_work(name, base, [size]))
    assert seconds > 0 and estimate.page_work(name, base, [size, size]) is not None
    for more in ({"seq_len": 1024}, {"num_seqs": 32}, {"train_seqs": 64}, {"steps": 300}, {"seeds": [0] * 6}):
        if set(more) <= set(base):
            assert RATES.seconds(estimate.page_work(name, base | more, [size])) > 1.05 * seconds
    assert estimate.page_work("09_speed", parameters("09"), [size]) is None


def test_memory_of_a_large_model_is_that_of_its_weights_and_batches():
    size = size_of("meta-llama/Meta-Llama-3-8B", "bfloat16")
    kinds = estimate.page_memory("03_grouping_ablation", parameters("03") | {"seq_len": 8192, "num_seqs": 2}, size)
    assert kinds["weights"] == pytest.approx(8.03e9 * 2, rel=0.001)
    assert kinds["keys and values"] == 8 * 8192 * 2 * 32 * 8 * 128 * 2
    assert kinds["logits"] == 1 * 8192 * 128256 * (2 + 2 + 4 + 4)
    captured = estimate.page_memory("04_predictor_evr", parameters("04") | {"seq_len": 8192}, size)
    assert captured["logits"] == 0
    spilled = estimate.page_disk("07_predictor_ablation", {"train_seqs": 4, "seq_len": 8192}, size)
    assert spilled > 4 * 8192 * size.values * 2 and not estimate.page_disk("03_grouping_ablation", {}, size)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gpt2", "float32")])
def test_memory_of_fine_tuning_is_what_training_holds(name, dtype, tmp_path, monkeypatch):
    folder, held, step = str(small_models.make(name, tmp_path)), [], torch.optim.AdamW.step

    def weighed(optimizer):
        step(optimizer)
        moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        held.append(tensor_bytes([*weights, *(weight.grad for weight in weights), *moments]))

    monkeypatch.setattr(torch.optim.AdamW, "step", weighed)
    tokens = torch.arange(4 * 16).reshape(4, 16)
    finetune(load_model(folder, dtype)[0], tokens, None, batch_size=2, progress=False)
    size = size_of(folder, dtype)
    kinds = estimate.page_memory("10_tasks", parameters("10"), size)
    assert held == [kinds["fine-tuning"] - 2 * weight_bytes(size.model)] and held[0] > 0  # two models are tuned
    assert kinds["logits"] > 0 and kinds["codebooks"] > 0
    assert estimate.page_memory("03_grouping_ablation", parameters("03"), size)["fine-tuning"] == 0


def test_what_is_estimated_are_pages():
    pages = {path.stem for path in repository_root().glob("notebooks/*.ipynb")}
    assert {*estimate.PAGES, *estimate.SCORED, *estimate.SPILLING, *estimate.TUNING} <= pages


def test_rates_are_measured_here_or_said_to_be_assumed():
    here = estimate.measured_rates(torch.float32, "cpu", 0.02)
    assert "measured on this machine" in here.where and 1e8 < here.model < 1e15
    if not torch.cuda.is_available():
        assumed = estimate.measured_rates(torch.bfloat16, "cuda")
        assert "one H100" in assumed.where and assumed.model == pytest.approx(989e12 * estimate.GPU_EFFICIENCY)


def test_an_unknown_model_gets_no_estimate(monkeypatch):
    with pytest.raises(DataError, match="no estimate is possible.*'nobody/nothing'"):
        configs.config_of("nobody/nothing")
    run = DryRun({"03_grouping_ablation": parameters("03") | {"model": "nobody/nothing", "second_model": ""}})
    assert any("no estimate is possible" in line for line in run.lines) and "  time: not estimated" in run.lines
    assert len(run.missing) == 1 and run.missing[0].startswith("model nobody/nothing: this process is offline")


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("You are trying to access a gated repo.\nMake sure", "ask for access on https://huggingface.co/a/b"),
        ("a/b is not a local folder and is not a valid model identifier listed on", "check the spelling"),
        ("Connection timed out", "check the network"),
    ],
)
def test_what_keeps_a_model_away_is_told_apart(message, remedy, monkeypatch):
    def fail(path):
        raise OSError(message)

    for variable in configs.OFFLINE:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(configs.AutoConfig, "from_pretrained", fail)
    with pytest.raises(DataError, match=remedy):
        configs.check_model("a/b")


def test_the_command_says_what_would_be_run_and_whether_it_can(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    model = str(small_models.make("llama", tmp_path / "model"))
    corpus = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    asked = ["--dry-run", "--only", "03", "--profile", "llama3-8b", "-p", f"model={model}", "-p", "device=cpu"]
    run = CliRunner().invoke(study.app, [*asked, "-p", f"corpus={corpus}"])
    assert run.exit_code == 0, run.output
    for shown in ("train_seqs = 1248", "memory: ", "weights ", "time: about", f"model {model}", f"corpus {corpus} (te"):
        assert shown in run.output
    assert not (tmp_path / "cache").exists()  # nothing was tokenised
    run = CliRunner().invoke(study.app, [*asked, "-p", f"corpus=slimpajama@{tmp_path}/nowhere"])
    assert run.exit_code == 1 and "cannot be reached: corpus" in run.output and "there is no folder" in run.output
    (tmp_path / "empty").mkdir()
    run = CliRunner().invoke(study.app, [*asked[:-4], "-p", f"model={tmp_path}/empty", "-p", f"corpus={corpus}"])
    assert run.exit_code == 1 and "lacks a config.json" in run.output
