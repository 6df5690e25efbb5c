"""Systems of page 11: published systems without the tokens that they keep exact, and every cross of their stages."""

import dataclasses
import itertools
from collections import defaultdict
from typing import Any

from vqkv import presets
from vqkv.presets import Preset
from vqkv.presets.crosses import BITS, ROTATIONS, TRANSFORM_CODERS
from vqkv.study.experiments.common import bare

AQUA = [f"aqua higgs {bits}" for bits in (2, 3, 4)]  # each tuned at its own rate
RANKS = (480, 960, 1600)  # of one basis for all layers; the first takes as many bytes as linear predictors do
KVTC: dict[str, dict] = {"": {}, ", block 32": {"block_tokens": 32}, ", rANS": {"deflate": False}}
KVTC |= {f", rank {rank}": {"rank": rank} for rank in RANKS}
KVTC |= {", rANS, rank 960": {"deflate": False, "rank": 960}}
BEST = {  # the designs of ``presets.best``, as page 11 measures them, by their stages
    "best-short": "trellis, fisher_pca, mixed, by head",
    "best-mid": "trellis, fisher_pca, predicted in 4 bits, mixed, by head",
    "best-long": "trellis, fisher_pca, predicted in 8 bits, mixed",
}
GROUPINGS = {"none": "strided", "hadamard": "contiguous", "pca": "strided", "fisher_pca": "strided"}


def published(
    vqllm: dict[str, list[int]], sink_tokens: int, seed: int, tuned: dict[str, dict] | None = None
) -> dict[str, Preset]:
    """Return label -> preset: the sources' systems and what came after, all with the same sinks and no window.

    ``vqllm``: num_quantizers and codebook_size by label. ``tuned``: arguments by family (of ``frontier.TRIALS``).
    """
    own: defaultdict[str, dict] = defaultdict(dict, tuned or {})
    preset_of = {f"quanto {bits}": presets.quanto(bits, **own[f"quanto {bits}"]) for bits in (2, 4)}
    preset_of |= {
        "kivi 2": presets.kivi(2, **own["kivi"]),
        "kvquant 2": presets.kvquant(2, seed=seed, **own["kvquant"]),
    }
    preset_of |= {f"higgs {bits}": presets.higgs(bits, **own["higgs"]) for bits in (2, 3, 4)}
    preset_of |= {"vqq product": presets.vqq_product(1e9, seed=seed, **{"block_tokens": 32} | own["vqq product"])}
    for label, (depth, size) in vqllm.items():
        preset_of[label] = presets.vqllm(depth, size, seed=seed, kmeans_iterations=4, **own["vqllm"])
    preset_of |= {name: presets.aqua(presets.higgs(int(name[-1])), **own[name]) for name in AQUA}
    cachegen = {"group": 16, "block_tokens": 128} | own["cachegen"]
    turboquant: dict = {"seed": seed} | own["turboquant"]
    preset_of |= {f"turboquant {bits}": presets.turboquant(bits, **turboquant) for bits in (2, 2.25, 2.5, 3, 4)}
    preset_of |= {f"block_gtq {bits}": presets.block_gtq(bits, bits, seed=seed) for bits in (2, 3)}
    preset_of |= {"oscar 2": presets.oscar(**own["oscar"]), "nova 2": presets.nova(seed=seed, **own["nova"])}
    preset_of |= {"fp8": presets.fp8(), "nvfp4": presets.nvfp4()}
    preset_of |= {"kvquant 2, Q-Norm": presets.kvquant(2, seed=seed, **{**own["kvquant"], "norm": True})}
    preset_of |= {f"kvarn {keys}+2": presets.kvarn(keys, **own["kvarn"]) for keys in (4, 2)}
    preset_of |= {f"cachegen {bits}": presets.cachegen(bits, **cachegen) for bits in (1.5, 2, 3)}
    preset_of |= {"nsnquant 2": presets.nsnquant(**own["nsnquant"])}
    preset_of |= {f"aatc {bits}": presets.aatc(bits, **own["aatc"]) for bits in (0.9, 1.8, 2.5)}
    for (variant, arguments), bits in itertools.product(KVTC.items(), (0.5, 0.75, 1, 1.5, 2, 3)):
        preset_of[f"kvtc {bits}{variant}"] = presets.kvtc(bits, **own["kvtc"] | arguments)
    preset_of |= {f"live {bits}": presets.live(bits, seed=seed) for bits in (2.25, 3.25)}
    preset_of |= {"aqua higgs 2, as published": presets.aqua(presets.higgs(2))}
    return {label: dataclasses.replace(bare(preset), sink_tokens=sink_tokens) for label, preset in preset_of.items()}


def factorial() -> dict[str, dict]:
    """Return label -> arguments of ``presets.crossed`` but for ``bits``: every combination that exists.

    No beam where bits are split, as that fits twice. Residual VQ groups channels as ``GROUPINGS`` says.
    """
    arguments_of: dict[str, dict] = {}
    for rotation, predicted, mixed in itertools.product(ROTATIONS, (False, True), (False, True)):
        shared = {"rotation": rotation, "predicted": predicted, "mixed": mixed}
        for quantizer in TRANSFORM_CODERS:
            _add(arguments_of, quantizer=quantizer, **shared)
            if mixed and rotation in ("pca", "fisher_pca"):
                _add(arguments_of, quantizer=quantizer, merged=False, **shared)
        for beam in (1,) if mixed else (1, 4):
            _add(arguments_of, quantizer="rvq", grouping=GROUPINGS[rotation], beam=beam, **shared)
    for rotation, grouping in GROUPINGS.items():
        other = "contiguous" if grouping == "strided" else "strided"
        _add(arguments_of, quantizer="rvq", rotation=rotation, grouping=other)
    for rotation, predicted, entropy in itertools.product(ROTATIONS[:3], (False, True), (False, True)):
        for quantizer in ("grid", "affine"):
            _add(arguments_of, quantizer=quantizer, rotation=rotation, predicted=predicted, entropy=entropy)
        if entropy:
            shared = {"rotation": rotation, "predicted": predicted, "grouping": GROUPINGS[rotation]}
            _add(arguments_of, quantizer="rvq", entropy=True, **shared)
    for predicted in (False, True):
        _add(arguments_of, quantizer="uniform", rotation="pca", predicted=predicted, mean=False)
    return arguments_of


def every() -> dict[str, dict]:
    """Return ``factorial``, one basis for all layers at ``RANKS``, predictors of 4 and 8 bits, and ``BEST`` by name."""
    arguments_of = factorial()
    for quantizer in TRANSFORM_CODERS:
        shared: dict[str, Any] = {"quantizer": quantizer, "rotation": "fisher_pca"}
        for rank in RANKS:
            arguments_of[f"{quantizer}, fisher_pca, joint, rank {rank}"] = shared | {"joint": True, "rank": rank}
        shared |= {"predicted": True, "mixed": True}
        for bits, merged in itertools.product((4, 8), (True, False)):
            label = f"{quantizer}, fisher_pca, predicted in {bits} bits, mixed" + ", by head" * (not merged)
            arguments_of[label] = shared | {"predictor_bits": bits, "merged": merged}
    return arguments_of | {name: arguments_of[stages] for name, stages in BEST.items()}


def exists(design: str, bits: float) -> bool:
    """Tell whether a design of ``every`` has so many bits: grids have 2, 3 and 4, affine codes whole numbers."""
    return bits in BITS.get(every()[design]["quantizer"], [bits])


def _add(arguments_of: dict[str, dict], **arguments) -> None:
    """Add arguments of ``presets.crossed`` under the name of what differs from the plainest design."""
    beam, grouping = arguments.get("beam", 1), arguments.get("grouping")
    parts = [arguments["quantizer"]] + [arguments["rotation"]] * (arguments["rotation"] != "none")
    parts += [name for name in ("predicted", "mixed", "entropy") if arguments.get(name)]
    parts += [f"beam {beam}"] * (beam > 1) + [grouping] * (grouping not in (None, GROUPINGS[arguments["rotation"]]))
    parts += ["mean kept"] * (not arguments.get("mean", True)) + ["by head"] * (not arguments.get("merged", True))
    arguments_of[", ".join(parts)] = arguments
