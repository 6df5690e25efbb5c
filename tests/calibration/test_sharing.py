"""Whole layers that read an earlier layer's cache (KVSharer)."""

import pytest
import torch
from strategies import TOKENS, feed, run

from vqkv import DataError, calibrate, evaluate, presets
from vqkv.models.capture import capture


def test_whole_layers_are_shared(llama):
    compressor = calibrate(llama, TOKENS, presets.kvsharer(threshold=-1.0), progress=False)
    ((_, later), (_, again)) = compressor.predictions
    (source,) = compressor.predictions["key", later].sources
    assert later == again and source[1] < later
    row = evaluate(llama, compressor, TOKENS, chunk_size=16)
    assert row["bits_per_value"] == pytest.approx(16 * 2 / 3) and row["side_bytes"] == 0
    cache = compressor.new_cache(llama)
    run(llama, cache, TOKENS[:2, :40], (40,))
    assert cache.layers[later].stores[0].payload.nbytes == 0
    read = feed(cache, *([x[:, :, :1] for x in role] for role in capture(llama, TOKENS[:2])), (1,))
    assert torch.equal(read[0][later][1][:, :, :-1], read[0][source[1]][1][:, :, :-1])


def test_pairs_are_taken_least_alike_first_and_only_above_the_threshold():
    class Trial:
        num_layers = 4

        def distances(self):
            d = torch.zeros(4, 4)
            for (i, j), x in {(0, 3): 9, (0, 1): 8, (1, 3): 7, (1, 2): 6, (2, 3): 5, (0, 2): 4}.items():
                d[i, j] = x
            return d

        def similarity(self, plan):
            shared = [layer for layer, roles in enumerate(plan) if roles["key"].predictor is not None]
            return 0.2 if 1 in shared else 0.9

    def sources(pairs, threshold):
        plan = presets.kvsharer(pairs, threshold).plan.arrange(presets.fp16(), Trial())
        return {i: roles["value"].sources[0][1] for i, roles in enumerate(plan) if roles["value"].sources}

    assert sources(1, 0.5) == {3: 0}
    assert sources(2, 0.1) == {3: 0, 1: 0}
    assert sources(2, 0.5) == {3: 0, 2: 1}  # 1 costs too much, 3 is already shared
    with pytest.raises(DataError, match="only 2 of 3 pairs"):
        sources(3, 0.5)
