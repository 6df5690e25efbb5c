"""Files that are written completely or not at all, also by two threads."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from vqkv.runtime.files import replacing


@pytest.fixture
def path(tmp_path):
    (tmp_path / "saved").write_bytes(b"old")
    return tmp_path / "saved"


def test_what_was_there_stays_until_the_new_file_is_complete(path):
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and [*path.parent.iterdir()] == [path]


def test_two_threads_replace_one_file_that_others_may_read_as_the_umask_lets_them(path):
    def write(data: bytes) -> None:
        with replacing(path) as file:
            file.write(data)

    before = os.umask(0o022)
    with ThreadPoolExecutor(1) as pool, replacing(path) as file:
        file.write(b"mine" * 9)
        pool.submit(write, b"other").result(30)
        assert path.read_bytes() == b"other"
    os.umask(before)
    assert path.read_bytes() == b"mine" * 9 and [*path.parent.iterdir()] == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_missing_folder_is_named(path):
    missing = pytest.raises(FileNotFoundError, match="no folder .*nowhere: make it first")
    with missing, replacing(path.parent / "nowhere/x"):
        pass
