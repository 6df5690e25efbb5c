"""The bench at a small size: every implementation holds the same codebooks and gives the same codes."""

import csv

from vqkv import bench


def test_peers_agree_and_the_csv_is_tidy(tmp_path):
    size = ["--rows", "200", "--dim", "8", "--num-quantizers", "2", "--codebook-size", "16", "--repetitions", "2"]
    bench.main([*size, "--out", str(tmp_path / "bench.csv")])
    with open(tmp_path / "bench.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["implementation"] for row in rows} >= {"vqkv", "faiss beam 1", "vector-quantize-pytorch", "brute force"}
    assert all(float(row["median_ms"]) > 0 and row["threads"] == "1" and row["shape"] for row in rows)
    assert {row["equal_to_ours"] for row in rows} <= {"1.000000", ""}
