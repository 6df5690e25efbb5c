"""Page 15: a quantizer of a reader's own, measured where it was not defined, and what the page makes of its rows."""

import nbformat
import numpy as np
import pytest
import torch

from vqkv.study.experiments import own_preset
from vqkv.study.experiments.own import imported
from vqkv.study.subject import Subject
from vqkv.study.tables import repository_root

(PAGE,) = (repository_root() / "notebooks").glob("15*.ipynb")
CELLS = nbformat.read(PAGE, as_version=4).cells
(CELL,) = (cell.source for cell in CELLS if "defines-quantizer" in cell.metadata.get("tags", []))
NF4 = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]  # Dettmers et al. 2023, appendix E
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """What the page's cell defines."""
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path))
    return imported(CELL)


def test_hard_values_come_back_and_the_levels_are_those_of_the_paper(cell):
    np.testing.assert_allclose(cell.NormalFloat(4).levels.float(), NF4, atol=5e-4)
    x = torch.randn(1, 2, 8, 64, generator=torch.Generator().manual_seed(0))
    x[0, :, 3:6] *= torch.tensor([0, 1e4, 1e-6])[:, None]
    codec = cell.nf(4).key_codec(64).fit(x)
    payload = codec.encode(x)
    error = codec.decode(payload) - x
    assert error.isfinite().all() and error.square().sum() < 0.02 * x.square().sum()
    assert 8 * payload.nbytes == x.numel() * 4 + 8 * 16  # codes, and a scale for each token


def test_it_is_measured_beside_others(cell):
    subject = Subject("vqkv/llama-mini", "python-stdlib", [1, 40], [1, 40])
    about = {"subject": subject, "models": [subject.name], "seeds": [0], "chunk_size": 18, "sink_tokens": 4}
    made = own_preset(**about, definition=CELL, preset="nf", bits=[4], beside=["higgs 4"])
    own, higgs = made.to_dict("records")
    assert (own["system"], own["nominal_bits"], higgs["system"], higgs["nominal_bits"]) == ("nf", 4, "higgs 4", 0)
    assert own["bits_per_value"] == higgs["bits_per_value"] == 4.125 and own["kl_floor"] < own["kl_mean"] < 0.1
