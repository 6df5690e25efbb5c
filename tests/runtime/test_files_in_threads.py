"""Two threads that write one file."""

from concurrent.futures import ThreadPoolExecutor

from vqkv.runtime.files import replacing


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
