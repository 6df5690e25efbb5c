"""Every preset, small enough for a random checkpoint and a few dozen tokens."""

from vqkv import presets

LEARNED = {"num_quantizers": 2, "codebook_size": 16, "group_size": 8}

SMALL = {
    "fp16": presets.fp16(),
    "lossless": presets.lossless(block_tokens=16),
    "vqllm": presets.vqllm(**LEARNED),
    "beam": presets.vqllm(**LEARNED, beam=4),
    "quanto": presets.quanto(),
    "hqq": presets.hqq(),
    "kivi": presets.kivi(block_tokens=16, recent_window=8),
    "kvquant": presets.kvquant(bits=2, block_tokens=16),
    "higgs": presets.higgs(recent_window=8),
    "vqq": presets.vqq(codebook_size=16, block_tokens=16),
    "vqq_product": presets.vqq_product(codebook_size=16, block_tokens=16),
    "vq": presets.vq(codebook_size=16, block_tokens=16),
    "rvq2": presets.rvq2(codebook_size=16, block_tokens=16),
    "turboquant": presets.turboquant(2),
    "fp8": presets.fp8(),
    "nvfp4": presets.nvfp4(),
    "kvarn": presets.kvarn(block_tokens=16),
    "cachegen": presets.cachegen(group=4, block_tokens=16),
    "nsnquant": presets.nsnquant(block_tokens=16),
    "block_gtq": presets.block_gtq(2.5),
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
