"""Parts that are learned by several processes, each from all of them: every part by one process, for all to take
over."""

from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from vqkv.codecs.base import Codec
from vqkv.codecs.part import Part, load_learned
from vqkv.runtime.files import claim
from vqkv.runtime.processes import current


def _owned(count: int, rank: int) -> range:
    return range(rank, count, current().count)


def learn(codecs: Sequence[Codec], batch: Sequence[Tensor], number_of_pass: int = 0) -> None:
    """One learning step of every codec that is not ready, in one of its passes, of whose batch each process gives its
    share."""
    processes, mine = current(), {}
    for number, (codec, x) in enumerate(zip(codecs, batch, strict=True)):
        if codec.ready or number_of_pass >= codec.passes:
            continue
        codec_batch = processes.rows(x)  # all of them, before any process begins to compute
        if number % processes.count == processes.rank:
            mine[codec] = codec_batch
        else:
            codec.prepare(x.shape[1], x.shape[3])
    for codec, x in mine.items():
        codec.partial_fit(x)


def end_pass(codecs: Sequence[Codec], number_of_pass: int) -> None:
    """Conclude a pass of this process's codecs."""
    for number in _owned(len(codecs), current().rank):
        if not codecs[number].ready and number_of_pass < codecs[number].passes:
            codecs[number].end_pass()


def finish(codecs: Sequence[Codec], devices: Sequence[torch.device]) -> None:
    """Freeze every codec, and let all processes have it on its device."""
    for number in _owned(len(codecs), current().rank):
        codecs[number].finalize()
    agree(codecs, devices)
    for codec in codecs:
        for part in codec.modules():
            if isinstance(part, Codec):
                part.ready = True


def agree(parts: Sequence[Part], devices: Sequence[torch.device]) -> None:
    """Let every process take over what each part's own process has learned, also amid learning."""
    processes = current()
    if processes.count == 1:
        return
    states = {number: parts[number].state_dict() for number in _owned(len(parts), processes.rank)}
    mine = {f"{i}.{name}": x.cpu().contiguous() for i, state in states.items() for name, x in state.items()}
    for rank, message in enumerate(processes.exchange(save(mine))):
        tensors = load(message)
        for number in _owned(len(parts), rank) if rank != processes.rank else ():
            state = claim(tensors, f"{number}.")
            load_learned(parts[number], {name: tensor.to(devices[number]) for name, tensor in state.items()})
