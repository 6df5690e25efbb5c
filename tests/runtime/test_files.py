"""Files that are written whole or not at all."""

import os

import pytest

from vqkv.runtime.files import replacing


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path):
    path = tmp_path / "saved"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and [*tmp_path.iterdir()] == [path]
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        with replacing(tmp_path / "saved") as file:
            file.write(b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o644


def test_a_missing_folder_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="no folder .*nowhere: make it first"),
        replacing(tmp_path / "nowhere/x"),
    ):
        pass
