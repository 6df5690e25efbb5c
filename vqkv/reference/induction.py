"""An induction circuit to begin from: one head that looks at the token before, one that finds what followed it earlier.

The two heads are those that a model grows by itself (Olsson et al. 2022, "In-context learning and induction heads").
Here that had not happened after 2.7 million tokens of repeats, and where it came sooner, of 16 words, it did not carry
over to others. Begun with, the circuit serves the whole vocabulary from the first step and training only has to keep
it. Other weights begin as the architecture says, but for louder embeddings and a last norm that makes up for it.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

LOUD = 8  # times an embedding's usual size, and the last norm as much smaller: so small a thing as a usual one is
# overwritten by AdamW's first steps on text, whose size does not depend on it
BEFORE = 1.1  # size of the position weights of the first head; its attention on the token before is then 0.9
MATCH = 1.5  # size of the queries and keys of the second head
NOTE, COPY = 0.4, 1.6  # how loudly the first head writes the token before, the second the token it found
CONSTANT = 6  # standard deviations of an embedding: a Llama without biases needs one dimension that all tokens share


@torch.no_grad()
def begin_llama(model: LlamaForCausalLM) -> None:
    """Set the first query head of layers 0 and 1, in place."""
    config = model.config
    dim, hidden = config.head_dim, config.hidden_size
    half = dim // 2
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    model.model.embed_tokens.weight[:, 0] = CONSTANT * config.initializer_range
    model.model.embed_tokens.weight.mul_(LOUD)
    model.model.norm.weight.div_(LOUD)
    fast = torch.arange(dim // 6)  # RoPE's fastest pairs distinguish neighbours
    angle = config.rope_parameters["rope_theta"] ** (-fast / half)
    first.k_proj.weight[fast, 0] = BEFORE
    first.q_proj.weight[fast, 0] = BEFORE * angle.cos()
    first.q_proj.weight[half + fast, 0] = -BEFORE * angle.sin()
    content, note, copied = _subspaces(dim, hidden, torch.arange(1, hidden))
    first.v_proj.weight[:dim] = content
    first.o_proj.weight[:, :dim] = NOTE * note.T
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, dim)])  # rotate little within a row
    for projection, read in ((second.q_proj, content), (second.k_proj, note)):
        projection.weight[:dim] = 0
        projection.weight[slow] = MATCH * read[slow]
    second.v_proj.weight[:dim] = copied
    second.o_proj.weight[:, :dim] = COPY * copied.T


@torch.no_grad()
def begin_gpt2(model: GPT2LMHeadModel) -> None:
    """Set the first head of layers 0 and 1 and the learned positions, in place.

    Positions begin as sinusoids (Vaswani et al. 2017, section 3.5), by which the token before is a rotation away; a
    quarter of the dimensions, those of the fastest, begin without words.
    """
    config = model.config
    hidden, dim = config.n_embd, config.n_embd // config.n_head
    fast = torch.arange(dim // 2)
    sines, cosines = fast, hidden // 2 + fast
    angle = 10_000 ** -torch.linspace(0, 1, hidden // 2)
    angles = torch.outer(torch.arange(config.n_positions), angle)
    size = torch.full((hidden // 2,), config.initializer_range / 4)
    size[fast] = config.initializer_range
    model.transformer.wpe.weight.copy_(torch.cat([size * angles.sin(), size * angles.cos()], 1))
    model.transformer.wte.weight[:, torch.cat([sines, cosines])] = 0
    for embedding in (model.transformer.wte, model.transformer.wpe):
        embedding.weight.mul_(LOUD)
    model.transformer.ln_f.weight.div_(LOUD)
    first, second = (block.attn for block in model.transformer.h[:2])
    query, key, value = first.c_attn.weight.split(hidden, 1)
    query[:, :dim] = key[:, :dim] = 0
    large, cos, sin = 4 * BEFORE, angle[fast].cos(), angle[fast].sin()
    key[sines, fast] = key[cosines, dim // 2 + fast] = large
    query[sines, fast] = query[cosines, dim // 2 + fast] = large * cos
    query[cosines, fast], query[sines, dim // 2 + fast] = -large * sin, large * sin
    words = torch.cat([torch.arange(dim // 2, hidden // 2), torch.arange(hidden // 2 + dim // 2, hidden)])
    content, note, copied = _subspaces(dim, hidden, words)
    value[:, :dim] = content.T
    first.c_proj.weight[:dim] = NOTE * note
    query, key, value = second.c_attn.weight.split(hidden, 1)
    query[:, :dim], key[:, :dim], value[:, :dim] = MATCH * content.T, MATCH * note.T, copied.T
    second.c_proj.weight[:dim] = COPY * copied


def _subspaces(dim: int, hidden: int, among: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw (dim, hidden) matrices of orthonormal rows that read the dimensions ``among``; the first two share none."""
    parts = torch.zeros(3 * dim, hidden)
    parts[: 2 * dim, among] = torch.nn.init.orthogonal_(torch.empty(2 * dim, len(among)))
    parts[2 * dim :, among] = torch.nn.init.orthogonal_(torch.empty(dim, len(among)))
    return parts[:dim], parts[dim : 2 * dim], parts[2 * dim :]


CIRCUITS = {"llama-mini": begin_llama, "gpt2-mini": begin_gpt2}


def untrained(name: str):
    """Make the model that training begins with, in fp32; its shape is in the bundled model's ``config.json``.

    The Llama's hidden size is three times its KV width, so that no layer's keys and values determine its input.
    """
    config = AutoConfig.from_pretrained(Path(__file__).parent / name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    CIRCUITS[name](model)
    return model
