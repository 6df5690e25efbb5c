"""``vqkv calibrate | evaluate | tasks | recommend | inspect``."""

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

import vqkv  # hands its names on when asked for: `vqkv --help` needs no torch
from vqkv.errors import FormatError
from vqkv.runtime.registry import parse_assignments

Model = Annotated[str, typer.Argument(help="smollm2-135m, vqkv/llama-mini, a folder, a GGUF file or a hub name")]
Corpus = Annotated[str, typer.Option(help="python, prose, local text, a data set, or NAME@FOLDER")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: spread over all cards, then main memory")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16; default: fp32 on a CPU, else the checkpoint's")]
Parameter = Annotated[list[str], typer.Option("-p", help="argument of the preset, name=value; repeatable")]
PRESETS = (  # of vqkv.presets, whose import takes seconds
    "fp16, lossless, vqllm, quanto, hqq, kivi, kvquant, higgs, vqq, vqq_product, vq, rvq2, aqua, kvsharer, crossed, "
    "best, live, fp8, nvfp4, turboquant, kvarn, cachegen, nsnquant, aatc, kvtc, oscar, nova, block_gtq"
)
SUITES = "a suite (local, old-leaderboard, longbench, ruler, wikitext) or a task of lm_eval; repeatable"


class Commands(typer.core.TyperGroup):
    """Commands that end bad input with its message, not with a traceback."""

    def invoke(self, ctx):
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands, help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)


@app.command()
def calibrate(
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
    batch_size: Annotated[int, typer.Option(help="sequences at a time")] = 8,
) -> None:
    """Fit a preset to a model and save the compressor."""
    wanted, out = vqkv.presets.make(preset, **parse_assignments(parameter)), out.resolve()
    loaded, tokens = _model_and_tokens(model, dtype, device, corpus, "train", seq_len, num_seqs, seed)
    compressor = vqkv.calibrate(loaded, tokens, wanted, batch_size)
    compressor.save_pretrained(out)
    typer.echo(f"{compressor} -> {out}")


@app.command()
def evaluate(
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
    loaded, tokens = _model_and_tokens(model, dtype, device, corpus, "test", seq_len, num_seqs, seed)
    fitted = vqkv.Compressor.from_pretrained(compressor)
    row = vqkv.evaluate(loaded, fitted, tokens, protocol, chunk_size=chunk_size, batch_size=batch_size)
    typer.echo(json.dumps(row, indent=1))


@app.command()
def tasks(
    model: Model,
    compressor: Annotated[str, typer.Option(help="folder of a compressor; without it the cache stays as it is")] = "",
    task: Annotated[list[str], typer.Option("--task", "-t", help=SUITES)] = ["local"],  # noqa: B006
    num_fewshot: Annotated[int | None, typer.Option(help="examples in the prompt, not as the suite has")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first documents of each task")] = None,
    protocol: Annotated[str, typer.Option(help="in_place or chunked")] = "chunked",
    chunk_size: int = 32,
    device: Device = "cpu",
    dtype: Dtype = "",
) -> None:
    """Leaderboard tasks on a model reading its compressed cache; print JSON rows."""
    from vqkv.evaluation.harness import run_tasks

    loaded, tokenizer = vqkv.load_model(model, dtype or None, device)
    fitted = vqkv.Compressor.from_pretrained(compressor) if compressor else None
    rows = run_tasks(loaded, tokenizer, fitted, task, num_fewshot, limit, protocol, chunk_size)
    typer.echo(json.dumps(rows, indent=1))


@app.command()
def recommend(
    model: Model,
    context: Annotated[int, typer.Option(help="tokens of each sequence")] = 8192,
    batch_size: Annotated[int, typer.Option(help="sequences that share the side information")] = 1,
    memory_gb: Annotated[float | None, typer.Option(help="GB of 10^9 bytes for weights and cache")] = None,
    ms_per_token: Annotated[float | None, typer.Option(help="that a step may take longer, on a CPU thread")] = None,
    everything: Annotated[bool, typer.Option("--all", help="also what does not fit, or is beaten")] = False,
) -> None:
    """Ways to store this model's cache, with what each lost on SmolLM2-135M. Only the model's config is read."""
    table = vqkv.recommend(model, context, batch_size, memory_gb, ms_per_token)
    shown = table if everything else table[table["recommended"]].drop(columns="recommended")
    shown = shown.assign(preset=shown.pop("preset"))  # last, as it is long
    typer.echo(shown.to_string(index=False, float_format="{:.3g}".format) if len(shown) else "nothing fits")
    typer.echo("Losses are those of SmolLM2-135M: evaluate yours. --all shows every row.")


@app.command()
def inspect(path: Annotated[Path, typer.Argument(help="folder of a compressor, or file of a saved cache")]) -> None:
    """Print what a compressor was fitted to, or what a saved cache holds. No model is loaded."""
    from vqkv.cache import saving

    try:
        if path.is_dir():
            title, about = _compressor(vqkv.Compressor.from_pretrained(path))
        else:
            about = saving.inspect(path)
            title = f"saved cache, made with {about['compressor']['name']!r} and {about['model']['name']!r}"
    except (FormatError, FileNotFoundError) as error:
        raise FormatError(f"{error}. vqkv inspect reads a compressor's folder or a saved cache (cache.save)") from error
    typer.echo(f"{title}\n{yaml.safe_dump(about, sort_keys=False)}")


def _compressor(compressor) -> tuple[str, dict]:
    model = {name: value for name, value in compressor.model.items() if name != "weights"}
    about = {"model": model, "settings": vars(compressor.settings), "notes": compressor.notes}
    about["first layer"] = {name: codec.config() for name, codec in zip(("key", "value"), compressor.codecs[0])}
    about["predictions"] = {
        f"{role} of layer {layer}": [f"{name} of layer {index}" for name, index in prediction.sources]
        for (role, layer), prediction in compressor.predictions.items()
    }
    about["bytes"] = {"predictors": compressor.predictor_bytes, "side information": compressor.side_bytes}
    return str(compressor), about


def _model_and_tokens(model, dtype, device, corpus, split, seq_len, num_seqs, seed) -> tuple:
    """A loaded model and tokens (num_seqs, seq_len) of a corpus."""
    loaded, tokenizer = vqkv.load_model(model, dtype or None, device)
    return loaded, vqkv.load_corpus(corpus, tokenizer, split, seq_len, num_seqs, seed)


if __name__ == "__main__":
    app()
