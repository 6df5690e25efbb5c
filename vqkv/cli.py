"""``vqkv calibrate | evaluate | inspect``."""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from vqkv import presets
from vqkv.calibrate import calibrate
from vqkv.compressor import Compressor
from vqkv.corpus import load_corpus
from vqkv.errors import DataError
from vqkv.evaluate import evaluate
from vqkv.models import load_model

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="bundled name (vqkv/llama-mini), local folder or hub name")]
Corpus = Annotated[str, typer.Option(help="python-stdlib, python-packages, local text, or a data set's name")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16; default: fp32 on a CPU, else the checkpoint's")]


@app.command("calibrate")
def calibrate_command(
    model: Model,
    out: Annotated[Path, typer.Argument(help="folder for the compressor")],
    preset: Annotated[str, typer.Option(help=f"one of: {', '.join(presets.PRESETS)}")] = "vqllm",
    parameter: Annotated[list[str], typer.Option("-p", help="argument of the preset, name=value; repeatable")] = [],  # noqa: B006
    corpus: Corpus = "python-stdlib",
    num_seqs: int = 64,
    seq_len: int = 512,
    seed: int = 0,
    device: Device = "cpu",
    dtype: Dtype = "",
) -> None:
    """Fit a preset to a model and save the compressor."""
    with _plain_errors():
        wanted = presets.make(preset, **_assignments(parameter))
        loaded, tokenizer = load_model(model, dtype or None, device)
        tokens = load_corpus(corpus, tokenizer, "train", seq_len, num_seqs, seed)
        compressor = calibrate(loaded, tokens, wanted)
        compressor.save_pretrained(out)
        typer.echo(f"{compressor} -> {out}")


@app.command("evaluate")
def evaluate_command(
    model: Model,
    compressor: Annotated[Path, typer.Argument(help="folder written by `vqkv calibrate`")],
    protocol: Annotated[str, typer.Option(help="in_place, chunked or snapshot")] = "chunked",
    corpus: Corpus = "python-stdlib",
    num_seqs: int = 8,
    seq_len: int = 512,
    seed: int = 0,
    device: Device = "cpu",
    dtype: Dtype = "",
) -> None:
    """Compare a model reading its compressed cache with itself reading everything exactly; print one JSON row."""
    with _plain_errors():
        loaded, tokenizer = load_model(model, dtype or None, device)
        tokens = load_corpus(corpus, tokenizer, "test", seq_len, num_seqs, seed)
        row = evaluate(loaded, Compressor.from_pretrained(compressor), tokens, protocol)
        typer.echo(json.dumps(row, indent=1))


@app.command("inspect")
def inspect_command(path: Annotated[Path, typer.Argument(help="folder of a saved compressor")]) -> None:
    """Print what a saved compressor was fitted to, its codecs and its side information."""
    with _plain_errors():
        compressor = Compressor.from_pretrained(path)
        key, value = compressor.codecs[0]
        typer.echo(compressor)
        model = {name: value for name, value in compressor.model.items() if name != "weights"}
        about = {"model": model, "settings": vars(compressor.settings), "notes": compressor.notes}
        about |= {"first layer": {"key codec": key.config(), "value codec": value.config()}}
        about["predictions"] = {
            f"{role} of layer {layer}": [f"{name} of layer {index}" for name, index in prediction.sources]
            for (role, layer), prediction in compressor.predictions.items()
        }
        about["bytes"] = {"predictors": compressor.predictor_bytes, "side information": compressor.side_bytes}
        typer.echo(yaml.safe_dump(about, sort_keys=False))


class _plain_errors:
    """Bad input ends with its message, not with a traceback."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, (ValueError, OSError)):
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        return False


def _assignments(pairs: list[str]) -> dict:
    for pair in pairs:
        if "=" not in pair:
            raise DataError(f"-p {pair!r}: write name=value")
    try:
        return {pair.split("=", 1)[0]: _literal(yaml.safe_load(pair.split("=", 1)[1])) for pair in pairs}
    except yaml.YAMLError as error:
        raise DataError(f"-p: not a value: {error}") from error


def _literal(value):
    """YAML reads 1e-3 as a word."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value) if isinstance(value, str) else value
    return value


if __name__ == "__main__":
    app()
