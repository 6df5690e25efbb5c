"""``vqkv compare | chat | calibrate | evaluate | recommend``."""

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer

import vqkv  # hands its names on when asked for: `vqkv --help` needs no torch

Model = Annotated[str, typer.Argument(help="smollm2-135m, vqkv/llama-mini, a folder, a GGUF file or a hub name")]
Corpus = Annotated[str, typer.Option(help="python, prose, local text, a data set, or NAME@FOLDER")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: spread over all cards, then main memory")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16; default: fp32 on a CPU, else the checkpoint's")]
Parameter = Annotated[list[str], typer.Option("-p", help="argument of the preset, name=value; repeatable")]
TASKS = "a suite (local, old-leaderboard, longbench, ruler, wikitext) or a task of lm_eval; repeatable"


class Commands(typer.core.TyperGroup):
    """Commands that end bad input with its message, not with a traceback, unless ``--debug`` is given."""

    def invoke(self, ctx):
        """Run the command that was named."""
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # no line of code under it
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            remedy = ": pip install 'vqkv[study,peers]'" if isinstance(error, ModuleNotFoundError) else ""
            typer.echo(f"error: {error}{remedy}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted" + "; the same command goes on" * (ctx.invoked_subcommand == "compare"), err=True)
            raise typer.Exit(130) from error


app = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def common(debug: Annotated[bool, typer.Option("--debug", help="show where an error was raised")] = False) -> None:
    """Store a KV cache in fewer bytes, and measure what that costs."""


@app.command()
def compare(
    model: Model,
    text: Annotated[str, typer.Option(help="a text file, a data set, or prose: calibrate and measure on it")] = "prose",
    minutes: Annotated[float, typer.Option(min=0.1, help="what to measure is chosen to fit")] = 15,
    context: Annotated[int, typer.Option(min=1, help="tokens that share the side information")] = 8192,
    out: Annotated[Path | None, typer.Option(help="folder for table, notebook and page", file_okay=False)] = None,
    device: Device = "cpu",
    dtype: Dtype = "",
) -> None:
    """Measure six ways to store this model's cache: bits, KL, facts, memory and time. An interrupted run goes on."""
    from vqkv.study.compare import SHOWN
    from vqkv.study.compare import compare as measure

    table = measure(model, text, minutes, context, dtype, device, out, typer.echo)
    typer.echo(table[SHOWN].to_string(index=False, float_format="{:.3g}".format))


@app.command()
def chat(
    model: Model,
    preset: Annotated[str, typer.Option(help="live, best, another preset, or none")] = "live",
    compressor: Annotated[str, typer.Option(help="folder or hub name of a fitted one, in place of a preset")] = "",
    parameter: Parameter = [],  # noqa: B006
    corpus: Corpus = "prose",
    max_new_tokens: int = 256,
    device: Device = "cpu",
    dtype: Dtype = "",
) -> None:
    """Talk to a model whose cache is compressed; an empty line ends. A preset is fitted first, or comes with vqkv."""
    from vqkv.cache.compressor import BUNDLED
    from vqkv.study.chat import chat as talk

    loaded, tokenizer = vqkv.load_model(model, dtype or None, device)
    if not compressor and not parameter and f"vqkv/{model}-{preset}" in BUNDLED:
        compressor = f"vqkv/{model}-{preset}"
    fitted = vqkv.Compressor.from_pretrained(compressor) if compressor else None
    if fitted is None and preset != "none":
        fitted = _fitted(loaded, tokenizer, preset, parameter, corpus, 512, 16)
    if loaded.config._attn_implementation == "sdpa":  # to which vqkv_packed hands all that is not packed
        loaded.set_attn_implementation("vqkv_packed")
    talk(loaded, tokenizer, fitted, max_new_tokens=max_new_tokens, write=typer.echo)


@app.command()
def calibrate(
    model: Model,
    out: Annotated[Path, typer.Argument(help="folder for the compressor", file_okay=False)],
    preset: Annotated[str, typer.Option(help="vqllm, live, best, kvtc, ...: vqkv/presets/README.md")] = "vqllm",
    parameter: Parameter = [],  # noqa: B006
    corpus: Corpus = "python",
    num_seqs: int = 64,
    seq_len: int = 512,
    device: Device = "cpu",
    dtype: Dtype = "",
) -> None:
    """Fit a preset to a model, save the compressor, and print what it is."""
    out = out.resolve()
    loaded, tokenizer = vqkv.load_model(model, dtype or None, device)
    compressor = _fitted(loaded, tokenizer, preset, parameter, corpus, seq_len, num_seqs)
    compressor.save_pretrained(out)
    typer.echo(f"{compressor} -> {out}")


@app.command()
def evaluate(
    model: Model,
    compressor: Annotated[str, typer.Argument(help="folder written by `vqkv calibrate`; without it only tasks")] = "",
    task: Annotated[list[str], typer.Option("--task", "-t", help=TASKS)] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="only the first documents of each task")] = None,
    protocol: Annotated[str, typer.Option(help="in_place, chunked or (not for tasks) snapshot")] = "chunked",
    chunk_size: Annotated[int, typer.Option(help="tokens fed at a time, for chunked")] = 32,
    corpus: Corpus = "python",
    num_seqs: int = 8,
    seq_len: int = 512,
    device: Device = "cpu",
    dtype: Dtype = "",
) -> None:
    """Compare a model that reads its compressed cache with itself, or run leaderboard tasks on it; print JSON rows."""
    loaded, tokenizer = vqkv.load_model(model, dtype or None, device)
    fitted = vqkv.Compressor.from_pretrained(compressor) if compressor or not task else None
    rows: list[dict] | dict
    if task:
        from vqkv.evaluation.harness import run_tasks

        rows = run_tasks(loaded, tokenizer, fitted, task, limit, protocol, chunk_size)
    else:
        text = vqkv.load_corpus(corpus, tokenizer, "test", seq_len, num_seqs)
        rows = vqkv.evaluate(loaded, fitted, text, protocol, chunk_size=chunk_size)
    typer.echo(json.dumps(rows, indent=1))


@app.command()
def recommend(
    model: Model,
    context: Annotated[int, typer.Option(help="tokens of each sequence")] = 8192,
    batch_size: Annotated[int, typer.Option(help="sequences that share the side information")] = 1,
    memory_gb: Annotated[float | None, typer.Option(help="GB of 10^9 bytes for weights and cache")] = None,
    ms_per_token: Annotated[float | None, typer.Option(help="that a step may take longer, on a CPU thread")] = None,
) -> None:
    """Ways to store this model's cache, with what each lost on SmolLM2-135M. Only the model's config is read."""
    table = vqkv.recommend(model, context, batch_size, memory_gb, ms_per_token)
    shown = table[table["recommended"]].drop(columns="recommended")
    shown = shown.assign(preset=shown.pop("preset"))  # last, as it is long
    typer.echo(shown.to_string(index=False, float_format="{:.3g}".format) if len(shown) else "nothing fits")
    typer.echo(
        "Shown is what no other beats in bits and KL; facts_lost, in points of 100, does not count, so look at it."
    )
    typer.echo("Losses are those of the model in measured_on: `vqkv compare` measures yours.")


def _fitted(model, tokenizer, preset: str, parameter: list[str], corpus: str, seq_len: int, num_seqs: int):
    """Fit a preset, after a line that says how long it will take."""
    from vqkv.calibration.effort import passes, seconds_per_token
    from vqkv.runtime.checks import parse_assignments

    wanted = vqkv.presets.make(preset, **parse_assignments(parameter))
    tokens = vqkv.load_corpus(corpus, tokenizer, "train", seq_len, num_seqs)
    minutes = passes(wanted.name) * seconds_per_token(model) * tokens.numel() / 60
    typer.echo(f"calibrating {preset} on {tokens.numel():,} tokens of {corpus}: about {minutes:.1g} minutes", err=True)
    compressor = vqkv.calibrate(model, tokens, wanted)
    compressor.notes["corpus"] = corpus
    return compressor


if __name__ == "__main__":
    app()
