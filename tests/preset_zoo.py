"""Every preset, small enough for a random checkpoint and a few dozen tokens."""

import codec_zoo

from vqkv import presets

LEARNED = {"num_quantizers": 2, "codebook_size": 16, "group_size": 8}

SMALL = codec_zoo.SMALL | {
    "fp16": presets.fp16(),
    "lossless": presets.lossless(block_tokens=16),
    "vqllm": presets.vqllm(**LEARNED),
    "beam": presets.vqllm(**LEARNED, beam=4),
    "kivi": presets.kivi(block_tokens=16, recent_window=8),
    "higgs": presets.higgs(recent_window=8),
    "turboquant": presets.turboquant(2),
    "turboquant outliers": presets.turboquant(2.25),
}

CODED = {name: presets.entropy_coded(SMALL[name], block_tokens=16) for name in ("vqllm", "kivi")}

CROSSED = {
    "steps": presets.crossed("uniform", 2.0, rotation="none", block_tokens=16),
    "split": presets.crossed("uniform", 1.5, rotation="hadamard", predicted=True, mixed=True, block_tokens=16),
}

EVERY = SMALL | {f"{name}+ans": preset for name, preset in CODED.items()} | CROSSED

PREDICTED = {
    "aqua-higgs": presets.aqua(presets.higgs(), recent_window=8),
    "aqua-vqllm": presets.aqua(presets.vqllm(**LEARNED), recent_window=0, sink_tokens=0),
    "aqua-kivi": presets.aqua(presets.kivi(block_tokens=16), first_layer_bits=16, recent_window=8),
    "aqua-quanto-gptq": presets.aqua(presets.quanto(), "gptq", key_from="K-1+K-2", value_from="V-1", pre_rope=False),
    "aqua-means": presets.aqua(presets.higgs(), "reduced_rank", key_from="none", value_from="mean", recent_window=0),
    "kvsharer": presets.kvsharer(threshold=-1),
    "kvtc": presets.kvtc(2.0, block_tokens=16, recent_window=8),
    "oscar": presets.oscar(sink_tokens=4, recent_window=8),
}

MLP = {"epochs": 2, "minibatch": 64}
PREDICTORS = {"linear": {}, "reduced_rank": {"rank": 3}, "mlp": MLP, "gptq": {"group_size": 4}}
