"""Every causal architecture that can be built small: it works with every preset, or is refused by name."""

import pytest
from architectures import NAMES, README, row


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_what_becomes_of_each_architecture(name):
    line = row(name)
    if line is None:
        pytest.skip("cannot be built small")
    assert line in README.read_text().splitlines(), f"run python tests/models/architectures.py: {line}"
