"""``vqkv calibrate | evaluate | tasks | recommend | inspect``."""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

import vqkv  # hands its names on when asked for: `vqkv --help` needs no torch
from vqkv.errors import DataError, FormatError

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="smollm2-135m, vqkv/llama-mini, a folder, a GGUF file or a hub name")]
Corpus = Annotated[str, typer.Option(help="python, prose, local text, a data set, or NAME@FOLDER")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: spread over all cards, then main memory")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16; default: fp32 on a CPU, else the checkpoint's")]
BatchSize = Annotated[int, typer.Option(help="sequences at a time")]
Parameter = Annotated[list[str], typer.Option("-p", help="argument of the preset, name=value; repeatable")]
PRESETS = (  # of vqkv.presets, whose import takes seconds
    "fp16, lossless, vqllm, quanto, hqq, kivi, kvquant, higgs, vqq, vqq_product, vq, rvq2, aqua, kvsharer, crossed, "
    "best, live, fp8, nvfp4, turboquant, kvarn, cachegen, nsnquant, aatc, kvtc, oscar, nova, block_gtq"
)
SUITES = "a suite (local, old-leaderboard, longbench, ruler, wikitext) or a task of lm_eval; repeatable"
READABLE = "vqkv inspect reads a compressor's folder or a saved cache (cache.save)"


@app.command("calibrate")
def calibrate_command(
    model: Model,
    out: Annotated[Path, typer.Argument(help="folder for the compressor", file_okay=False)],
    preset: Annotated[str, typer.Option(help=f"one of: {PRESETS}")] = "vqllm",
    parameter: Parameter = [],  # noqa: B006
    corpus: Corpus = "python",
    num_seqs: int = 64,
    seq_len: int = 512,
    seed: int = 0,
    device: Device = "cpu",
    dtype: Dtype = "",
    batch_size: BatchSize = 8,
) -> None:
    """Fit a preset to a model and save the compressor."""
    with _plain_errors():
        wanted, out = vqkv.presets.make(preset, **_assignments(parameter)), out.resolve()
        loaded, _, tokens = _model_and_tokens(model, dtype, device, corpus, "train", seq_len, num_seqs, seed)
        compressor = vqkv.calibrate(loaded, tokens, wanted, batch_size)
        compressor.save_pretrained(out)
        typer.echo(f"{compressor} -> {out}")


@app.command("evaluate")
def evaluate_command(
    model: Model,
    compressor: Annotated[Path, typer.Argument(help="folder written by `vqkv calibrate`")],
    protocol: Annotated[str, typer.Option(help="in_place, chunked or snapshot")] = "chunked",
    chunk_size: Annotated[int, typer.Option(help="tokens fed at a time, for chunked")] = 32,
    corpus: Corpus = "python",
    num_seqs: int = 8,
    seq_len: int = 512,
    seed: int = 0,
    device: Device = "cpu",
    dtype: Dtype = "",
    batch_size: Annotated[int | None, typer.Option(help="sequences at a time")] = None,
) -> None:
    """Compare a model reading its compressed cache with itself reading everything exactly; print one JSON row."""
    with _plain_errors():
        loaded, _, tokens = _model_and_tokens(model, dtype, device, corpus, "test", seq_len, num_seqs, seed)
        row = vqkv.evaluate(
            loaded,
            vqkv.Compressor.from_pretrained(compressor),
            tokens,
            protocol,
            chunk_size=chunk_size,
            batch_size=batch_size,
        )
        typer.echo(json.dumps(row, indent=1))


@app.command("tasks")
def tasks_command(
    model: Model,
    compressor: Annotated[
        str, typer.Option(help="folder written by `vqkv calibrate`; without it the cache stays as it is")
    ] = "",
    task: Annotated[list[str], typer.Option("--task", "-t", help=SUITES)] = ["local"],  # noqa: B006
    num_fewshot: Annotated[
        int | None, typer.Option(help="examples in the prompt, not as the suite or task has")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="only the first documents of each task")] = None,
    protocol: Annotated[str, typer.Option(help="in_place or chunked")] = "chunked",
    chunk_size: int = 32,
    device: Device = "cpu",
    dtype: Dtype = "",
) -> None:
    """Leaderboard tasks on a model reading its compressed cache; print JSON rows."""
    with _plain_errors():
        from vqkv.evaluation.harness import run_tasks

        loaded, tokenizer = vqkv.load_model(model, dtype or None, device)
        fitted = vqkv.Compressor.from_pretrained(compressor) if compressor else None
        rows = run_tasks(loaded, tokenizer, fitted, task, num_fewshot, limit, protocol, chunk_size)
        typer.echo(json.dumps(rows, indent=1))


@app.command("recommend")
def recommend_command(
    model: Model,
    context: Annotated[int, typer.Option(help="tokens of a sequence")] = 8192,
    batch_size: Annotated[int, typer.Option(help="sequences that share the side information")] = 1,
    memory_gb: Annotated[float | None, typer.Option(help="GB of 10^9 bytes for weights and cache")] = None,
    ms_per_token: Annotated[float | None, typer.Option(help="that a step may take longer, on a CPU thread")] = None,
    everything: Annotated[bool, typer.Option("--all", help="also what does not fit, or is beaten")] = False,
) -> None:
    """Ways to store this model's cache, the fewest bytes first, with what each lost on SmolLM2-135M. Of the model only
    its config is read."""
    with _plain_errors():
        table = vqkv.recommend(model, context, batch_size, memory_gb, ms_per_token)
        shown = table if everything else table[table["recommended"]].drop(columns="recommended")
        shown = shown.assign(preset=shown.pop("preset"))  # last, as it is long
        typer.echo(shown.to_string(index=False, float_format="{:.3g}".format) if len(shown) else "nothing fits")
        typer.echo("Losses are those of SmolLM2-135M: evaluate yours. --all shows every row.")


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(help="folder of a saved compressor, or file of a saved cache")],
) -> None:
    """Print what a compressor was fitted to and its codecs, or what a saved cache holds and what it was made for. No
    model is loaded."""
    with _plain_errors():
        try:
            typer.echo(_compressor(path) if path.is_dir() else _file(path))
        except FormatError as error:
            raise FormatError(f"{error}. {READABLE}") from error


def _model_and_tokens(model, dtype, device, corpus, split, seq_len, num_seqs, seed) -> tuple:
    """A loaded model, its tokenizer and tokens (num_seqs, seq_len) of a corpus."""
    loaded, tokenizer = vqkv.load_model(model, dtype or None, device)
    return loaded, tokenizer, vqkv.load_corpus(corpus, tokenizer, split, seq_len, num_seqs, seed)


def _compressor(folder: Path) -> str:
    compressor = vqkv.Compressor.from_pretrained(folder)
    model = {name: value for name, value in compressor.model.items() if name != "weights"}
    about = {"model": model, "settings": vars(compressor.settings), "notes": compressor.notes}
    about["first layer"] = {name: codec.config() for name, codec in zip(("key", "value"), compressor.codecs[0])}
    about["predictions"] = {
        f"{role} of layer {layer}": [f"{name} of layer {index}" for name, index in prediction.sources]
        for (role, layer), prediction in compressor.predictions.items()
    }
    about["bytes"] = {"predictors": compressor.predictor_bytes, "side information": compressor.side_bytes}
    return f"{compressor}\n{yaml.safe_dump(about, sort_keys=False)}"


def _file(path: Path) -> str:
    from vqkv.cache import saving

    if not path.is_file():
        raise FormatError(f"{path} is not there, or no file")
    about = saving.inspect(path)
    made = f"compressor {about['compressor']['name']!r} and model {about['model']['name']!r}"
    return f"saved cache, made with {made}\n{yaml.safe_dump(about, sort_keys=False)}"


@contextlib.contextmanager
def _plain_errors():
    """End bad input with its message, not with a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _assignments(pairs: list[str]) -> dict:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            found[name] = _literal(yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise DataError(f"-p {pair!r}: not a value: {error}") from error
        if not equals:
            raise DataError(f"-p {pair!r}: write name=value")
    return found


def _literal(value):
    """YAML reads 1e-3 as a word."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value) if isinstance(value, str) else value
    return value


if __name__ == "__main__":
    app()
