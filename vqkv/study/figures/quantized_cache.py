"""Figures of notebook 16."""

import matplotlib.pyplot as plt

from vqkv.study.figures.generation import plain_numbers, style_of
from vqkv.study.figures.style import by_model, mark_floor


def residual_plane(table, bits: str, lines: list[str], dots: dict[str, str]):
    """KL, with its 95% interval over sequences, against the column ``bits``, a panel for each model: ``lines`` by the
    number of recent tokens kept exact, which stands at the first's points, and ``dots`` of one length, a name each.
    Hollow: transformers' own caches. ``table``: from ``residual_lengths``."""
    fig, axes, panels = by_model(table, (11, 4.6))
    for ax, model, mine in panels:
        for system in [*lines, *dots]:
            rows, (colour, marker) = mine[mine["system"] == system], style_of(system)
            spread = [rows["kl_mean"] - rows["kl_low"], rows["kl_high"] - rows["kl_mean"]]
            look = {"color": colour, "mfc": "white" if system.startswith("transformers") else colour, "elinewidth": 1}
            look |= {"fmt": marker + "-" * (system in lines), "ms": 9 if system == lines[0] else 6}
            ax.errorbar(rows[bits], rows["kl_mean"], spread, label=system, zorder=2 + (system != lines[0]), **look)
        for row in mine[mine["system"] == lines[0]].itertuples():
            where = {"xytext": (8, 5), "textcoords": "offset points", "fontsize": 9}
            ax.annotate(f"{row.length}", (getattr(row, bits), row.kl_mean), **where)
        for system, name in dots.items():
            for row in mine[mine["system"] == system].itertuples():
                where = {"xytext": (8, 0), "textcoords": "offset points", "fontsize": 9, "va": "center"}
                ax.annotate(name, (getattr(row, bits), row.kl_mean), color=style_of(system)[0], **where)
        ax.set(title=model.split("/")[-1], yscale="log", xlabel="bits per value, exact tokens included")
        ax.margins(x=0.12, y=0.08)
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL to the exact cache (nats)")
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
        axes[0].errorbar(rows["batch"], rows["slowdown"], spread, fmt=marker + "-", color=colour, label=system)
        rows = by_prompt[by_prompt["system"] == system].sort_values("context")
        axes[1].plot(rows["context"], rows["prefill_ms"] / rows["decode_ms"], marker + "-", color=colour)
    axes[0].set(xscale="log", xlabel="sequences generated at a time", ylabel="a token's time over DynamicCache's")
    axes[1].set(xscale="log", yscale="log", xlabel="tokens of the prompt")
    axes[1].set_ylabel("first token's time over a following one's")
    for ax, ticks in zip(axes, (batches, contexts), strict=True):
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.minorticks_off()
    plain_numbers(axes[1].yaxis)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(systems))
    return fig
