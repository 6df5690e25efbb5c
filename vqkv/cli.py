"""``vqkv calibrate | evaluate | inspect``."""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from vqkv import presets, saved
from vqkv.calibrate import calibrate
from vqkv.compressor import Compressor
from vqkv.corpus import load_corpus
from vqkv.errors import DataError, FormatError
from vqkv.evaluate import evaluate
from vqkv.models import load_model
from vqkv.snapshot_forms import dtype_name
from vqkv.snapshot_layout import SIZES
from vqkv.snapshots import MAGIC, SnapshotReader

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="bundled name (vqkv/llama-mini), local folder or hub name")]
Corpus = Annotated[str, typer.Option(help="python-stdlib, python-packages, local text, or a data set's name")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
READABLE = (
    "vqkv inspect reads a compressor's folder (compressor.save_pretrained), a saved cache (cache.save) or a snapshot "
    "stream (SnapshotWriter)"
)
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
def inspect_command(
    path: Annotated[
        Path, typer.Argument(help="folder of a saved compressor, or file: a saved cache, a snapshot stream")
    ],
) -> None:
    """Print what a compressor was fitted to and its codecs; what a saved cache holds and what it was made for; or the
    bytes of a snapshot stream. No model is loaded."""
    with _plain_errors():
        typer.echo(_inspected(path))


def _inspected(path: Path) -> str:
    try:
        return _reader(path)(path)
    except FormatError as error:
        raise FormatError(f"{error}. {READABLE}") from error


def _reader(path: Path):
    """Which kind of thing ``path`` is, as the function that prints it."""
    if path.is_dir():
        return _compressor
    if not path.is_file():
        raise FormatError(f"{path} is not there, or no file")
    with open(path, "rb") as file:
        return _stream if file.read(len(MAGIC)) == MAGIC else _cache


def _compressor(folder: Path) -> str:
    compressor = Compressor.from_pretrained(folder)
    key, value = compressor.codecs[0]
    model = {name: value for name, value in compressor.model.items() if name != "weights"}
    about = {"model": model, "settings": vars(compressor.settings), "notes": compressor.notes}
    about |= {"first layer": {"key codec": key.config(), "value codec": value.config()}}
    about["predictions"] = {
        f"{role} of layer {layer}": [f"{name} of layer {index}" for name, index in prediction.sources]
        for (role, layer), prediction in compressor.predictions.items()
    }
    about["bytes"] = {"predictors": compressor.predictor_bytes, "side information": compressor.side_bytes}
    return f"{compressor}\n{_yaml(about)}"


def _cache(path: Path) -> str:
    about = saved.inspect(path)
    made = f"compressor {about['compressor']['name']!r} and model {about['model']['name']!r}"
    return f"saved cache, made with {made}\n{_yaml(about)}"


def _stream(path: Path) -> str:
    stream = SnapshotReader(path)
    about = {"dtype": dtype_name(stream.dtype)} | {name: getattr(stream, name) for name in (*SIZES, "damaged")}
    return f"snapshot stream of {len(stream)} steps\n{_yaml(about | stream.report())}"


def _yaml(about: dict) -> str:
    return yaml.safe_dump(about, sort_keys=False)


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
