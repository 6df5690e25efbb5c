"""Tile settings by operation: chosen from the disassembly, for Hopper. Tuned numbers of other devices go here, too.

``num_warps`` and ``num_stages`` as Triton has them: a program's warps of 32 threads, and tiles on their way at a time.
"""

ENCODE = {
    "many": {
        "block_m": 256,  # sub-vectors of a program, which share each tile of codes it loads
        "block_c": 64,  # codes of a tile
        "fold": 8,  # scores of a tile that become one: block_c / 8 is what a thread has of them
        "depth": 1,  # tiles over which the smallest is taken; fold * depth codes are then compared in fp32
        "unroll": 4,  # tiles between two barriers: 1, 2 or 4
        "num_warps": 16,  # 16 rows each, the fewest of a tensor core's operand
        "num_stages": 3,  # times ``unroll`` tiles in shared memory, or on their way there
    },
    "few": {"block_m": 64, "block_c": 64, "fold": 8, "depth": 1, "unroll": 2, "num_warps": 4, "num_stages": 3},
    "few_below": 256 * 132,  # sub-vectors: fewer than one program of many for each multiprocessor of an H100
    "few_from": 32,  # channels: sub-vectors of more spill where 256 share a program
    "long": {"block_m": 32, "block_c": 64, "fold": 8, "depth": 1, "unroll": 1, "num_warps": 4, "num_stages": 2},
    "long_from": 64,  # channels: tiles of more would fill the shared memory
    "longest": 256,  # channels: the most that registers hold
    # block_m counts candidates; groups of 16 codes, as taking the best out of a chunk's scores costs more than scoring
    "beam": {"block_m": 64, "block_c": 64, "fold": 2, "depth": 8, "unroll": 1, "num_warps": 4, "num_stages": 3},
}

STATISTICS = {
    "sum": {
        "block_rows": 16,  # held at a time: more registers would leave fewer programs to hide the latency
        "piece": 128,  # rows of a program, so that a popular code is shared by several
        "num_warps": 1,  # a row is short, and pieces are many
    },
    "join": {"block_pieces": 4, "num_warps": 1},  # few codes have more pieces
}

PACKING = {
    "lanes": 1024,  # words packed or codes unpacked by a program: eight a thread
    "num_warps": 4,
}

AFFINE = {"values": 4096, "num_warps": 4}  # 32 values a thread: whole groups, in few registers

GRID = {"pairs": 1024, "num_warps": 4}  # eight pairs a thread, for which a point is loaded once

DECODE = {
    "coded": {"values": 4096, "num_warps": 4},  # 32 values a thread: four vectors of 8 from the table at a time
    "affine": {"values": 4096, "num_warps": 4},
    "vector": 8,  # channels of a chunk, at most: 16 bytes of an fp16 table
}

ATTENTION = {
    # tokens of a tile, by query rows of a program: as many as registers hold, since a tile's constant costs are shared
    "BLOCK_N": {
        "affine": {8: 128, 16: 128, 32: 64},
        "product": {8: 128, 16: 128, 32: 64},  # 128: a thread then loads 16 bytes of codes at once
        "coded": {8: 64, 16: 64, 32: 64},  # the rest, and all with RoPE; 32 rows of residual VQ spill 176 bytes
    },
    "long_head": 128,  # channels: of longer heads, half as many tokens
    "num_warps": 4,  # a fourth of the tokens each; with 8, more work is done twice
    "num_stages": 2,
    "programs_each": 4,  # programs for each multiprocessor, if there are tokens enough
    "least_tiles": 2,  # tiles of a share, at least
    "most_rows": 32,  # query heads of a KV head times new tokens: sums for 64 leave the tile no registers
}
