"""Tile settings by operation: chosen from the disassembly, for Hopper. Tuned numbers of other devices go here, too."""

ATTENTION = {
    "affine": {"BLOCK_N": 128, "num_warps": 4, "num_stages": 2},  # half the instructions a token of 64 tokens a tile
    "coded": {"BLOCK_N": 64, "num_warps": 4, "num_stages": 2},  # 128 tokens of residual VQ spill
    "programs_each": 4,  # programs for each multiprocessor, if there are tokens enough
    "least_tiles": 2,  # tiles of a share, at least
    "most_rows": 64,  # query heads of a KV head times new tokens
}
