"""Figures of notebook 16."""

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

from vqkv.study.figures.generation import style_of
from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE, by_model, mark_floor

ELSEWHERE = {"at_1k": ("--", "1,024"), "at_8k": (":", "8,192")}  # column of the steps -> line, tokens


def residual_lines(table, steps, systems: list[str]):
    """KL, with its 95% interval over sequences, against the number of recent tokens kept exact, a panel for each model;
    grey: where the first system's would stand if its added bits had gone to every token. ``table``: from
    ``residual_lengths``, ``steps``: from ``worth_of_steps``."""
    fig, axes, panels = by_model(table, (11, 4.6))
    for ax, model, mine in panels:
        first = mine[mine["system"] == systems[0]]
        places = {length: place for place, length in enumerate(first["length"])}
        for shift, system in zip((-0.06, 0.06), systems, strict=False):
            rows, (colour, marker) = mine[mine["system"] == system], style_of(system)
            ends = [rows["kl_mean"] - rows["kl_low"], rows["kl_high"] - rows["kl_mean"]]
            look = {"color": colour, "mfc": "white" if system.startswith("transformers") else colour, "ms": 7}
            at = [places[length] + shift for length in rows["length"]]
            ax.errorbar(at, rows["kl_mean"], ends, fmt=marker + "-", label=system, elinewidth=1, **look)
        for column, (line, tokens) in ELSEWHERE.items():
            gains = [1, *steps.loc[model, column].cumprod()]
            label = f"the same bits for every token, at {tokens} tokens"
            ax.plot([first["kl_mean"].iloc[0] / gain for gain in gains], line, color=PALETTE["published"], label=label)
        ax.set(title=model.split("/")[-1], yscale="log", xlabel="residual length (tokens)")
        ax.set_xticks(list(places.values()), list(places))
        ax.set_ylim(bottom=0.7 * table["kl_low"][table["system"].isin(systems)].min())  # room for the floor's number
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL to the exact cache (nats)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def rate_lines(times, batches: list[int], contexts: list[int], systems: list[str]):
    """Left: time of a token over ``DynamicCache``'s for the same token, with quartiles, against batch size. Right: time
    to the first token over that of a following one, against the prompt's length."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    by_batch = times[times["batch"].isin(batches) & (times["context"] == times["context"].mode()[0])]
    by_prompt = times[(times["batch"] == 1) & times["context"].isin(contexts)].drop_duplicates(["system", "context"])
    for system in systems:
        colour, marker = style_of(system)
        rows = by_batch[by_batch["system"] == system]
        spread = [rows["slowdown"] - rows["slowdown_q1"], rows["slowdown_q3"] - rows["slowdown"]]
        look = {"color": colour, "mfc": "white" if system.startswith("transformers") else colour, "ms": 8}
        axes[0].errorbar(rows["batch"], rows["slowdown"], spread, fmt=marker + "-", label=system, elinewidth=1, **look)
        rows = by_prompt[by_prompt["system"] == system].sort_values("context")
        axes[1].plot(rows["context"], rows["prefill_ms"] / rows["decode_ms"], marker + "-", **look)
    axes[0].set(xscale="log", xlabel="sequences generated at a time", ylabel="a token's time over DynamicCache's")
    axes[1].set(xscale="log", yscale="log", xlabel="tokens of the prompt")
    axes[1].set_ylabel("first token's time over a following one's")
    for ax, ticks in zip(axes, (batches, contexts), strict=True):
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.minorticks_off()
    axes[1].yaxis.set_minor_locator(LogLocator(subs="auto"))
    plain_numbers(axes[1].yaxis)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(systems))
    return fig
