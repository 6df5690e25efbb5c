"""Files that are written completely or not at all, also by two threads."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from vqkv.runtime.files import replacing


def test_what_was_there_stays_until_the_new_file_is_complete(tmp_path):
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
    with replacing(tmp_path / "saved") as file:
        file.write(b"new")
    os.umask(before)
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o644


def test_two_threads_replace_one_file(tmp_path):
    path = tmp_path / "file"

    def write(data: bytes) -> None:
        with replacing(path) as file:
            file.write(data)

    with ThreadPoolExecutor(1) as pool, replacing(path) as file:
        file.write(b"mine" * 9)
        pool.submit(write, b"other").result(30)
        assert path.read_bytes() == b"other"
    assert path.read_bytes() == b"mine" * 9 and list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="no folder .*nowhere: make it first"),
        replacing(tmp_path / "nowhere/x"),
    ):
        pass
