"""The driver, on toy notebooks in a temporary folder, which do without tables: torch would take the longest."""

from pathlib import Path

import nbformat
import pytest

from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.runtime.checks import parse_assignments
from vqkv.study import driver as study
from vqkv.study import pages
from vqkv.study.pages import strip, written

PARAMETERS = 'sizes = [1, 2]  # of something\nrate = 0.5  # per step\nname = "a"\nsteps = 3\nsay = None'
WRITE = """from pathlib import Path
from vqkv.study.steering import current as run
out = Path(run.out, "results"); out.mkdir(exist_ok=True)
out.joinpath("toy.csv").write_text(f"{sizes},{rate},{name},{steps},{run.recompute},{run.workers}")
print(Path.cwd().name, steps); display({"application/vnd.jupyter.widget-view+json": {}}, raw=True)"""
AFTER = """from pathlib import Path
from vqkv.study import steering
out = Path(steering.current.out)
assert all(out.joinpath(f"{each}.ended").exists() for each in sizes)
_ = out.joinpath(f"{name}.ended").write_text("")"""
TABLES = """class DataError(ValueError): ...
class tables:
    def table(least):
        if steps < least:
            raise DataError(f"{steps} steps")
        return steps"""


def write(path: Path, *sources: str, parameters: str = PARAMETERS, tag: str = "") -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (parameters, *sources)])
    notebook.cells[0].metadata["tags"] = ["parameters", *[tag] * bool(tag)]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(written(strip(notebook)))
    return path


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "notebooks/01_first.ipynb", WRITE)
    return tmp_path


def test_default_profile_refreshes_the_page_in_place_and_repeats_itself(root):
    page = root / "notebooks/01_first.ipynb"
    assert study.Study(root).run() == {}
    first = page.read_bytes()
    nbformat.validate(notebook := nbformat.read(page, as_version=4))
    outputs, count = notebook.cells[1].outputs, notebook.cells[1].execution_count
    assert [output.get("text") for output in outputs] == ["notebooks 3\n"] and count == 2
    assert b"papermill" not in first and b"injected" not in first and b"iopub" not in first
    assert (root / "results/toy.csv").read_text() == "[1, 2],0.5,a,3,False,0"
    assert study.Study(root, recompute=True, workers=3).run() == {}
    assert page.read_bytes() == first and (root / "results/toy.csv").read_text().endswith(",True,3")
    assert not (root / "runs").exists()


def test_other_parameters_go_to_their_own_folder(root):
    before = (root / "notebooks/01_first.ipynb").read_bytes()
    run = study.Study(root, parameters=parse_assignments(["steps=7", "rate=1", "sizes=[4]", "say=[1]", "name=b"]))
    assert run.run() == {}
    assert (root / "notebooks/01_first.ipynb").read_bytes() == before and not (root / "results").exists()
    assert run.target.parent == root / "runs" and run.target.name.startswith("custom-")
    assert (run.target / "results/toy.csv").read_text() == "[4],1.0,b,7,False,0"
    executed = (run.target / "notebooks/01_first.ipynb").read_text()
    assert "injected-parameters" in executed and "notebooks 7" in executed


@pytest.mark.parametrize("failure", ["raise ValueError('no such luck')", "import os; os._exit(1)"])
def test_a_failing_notebook_keeps_its_page_and_does_not_stop_the_next(root, failure):
    bad = write(root / "notebooks/00_bad.ipynb", "print('before')", failure)
    before = bad.read_bytes()
    failures = study.Study(root).run()
    kept = root / "runs/failed/00_bad.ipynb"
    assert list(failures) == ["00_bad"] and str(kept) in failures["00_bad"]
    assert bad.read_bytes() == before and "before" in kept.read_text()
    assert "notebooks 3" in (root / "notebooks/01_first.ipynb").read_text()


def test_elsewhere_every_claim_has_a_verdict_and_an_error_is_still_an_error(root):
    write(root / "notebooks/01_first.ipynb", "x = 3\nassert steps == x, 'three'\nassert x == 3", "print('to the end')")
    write(root / "notebooks/02_second.ipynb", "assert steps == 3", "steps / 0")
    write(root / "notebooks/03_third.ipynb", "y = {3: True}[steps]\nassert y\n\nassert steps / 0\nsteps + 5")
    write(root / "notebooks/04_fourth.ipynb", "{3: True}[steps]", "print(steps)")
    run = study.Study(root, parameters={"steps": 4}, out=root / "out")
    assert list(run.run()) == ["02_second", "04_fourth"] and (root / "out/failed/02_second.ipynb").is_file()
    first, third = run.claims["01_first"], run.claims["03_third"]
    assert first == {"assert steps == x, 'three'": "does not hold here (found three)", "assert x == 3": "holds"}
    assert third["assert steps / 0"].startswith("cannot be asked here (ZeroDivisionError")
    page = nbformat.read(root / "out/notebooks/03_third.ipynb", as_version=4)
    assert page.cells[3].outputs[0].text == f"{third['assert y']}\n" == "cannot be asked here (KeyError: 4)\n"
    assert page.cells[5].outputs[0].data["text/plain"] == "9"
    assert "to the end" in (root / "out/notebooks/01_first.ipynb").read_text()


@pytest.mark.parametrize(("steps", "refused"), [(3, []), (2, ["2 steps"]), (1, None)])
def test_elsewhere_a_page_goes_without_tables_but_not_without_all(root, steps, refused):
    made = "x = tables.table(2)\nassert x > 2", "y = tables.table(3)", "y + 0"
    write(root / "notebooks/01_first.ipynb", TABLES, *made)
    run = study.Study(root, parameters={"steps": steps}, out=root / "out")
    failed = run.run()
    assert run.refused == ({} if refused is None else {"01_first": refused})
    assert [*failed] == ["01_first"] * (refused is None) and all("1 steps" in error for error in failed.values())


def test_what_runs_with_which_parameters(root, tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text("'*': {steps: 1, foreign: 2}\n01_first: {rate: 1e-3}\n")
    with monkeypatch.context() as patch:
        patch.setattr(pages, "PROFILES", tmp_path)
        small = study.Study(root, profile="small", parameters={"steps": 9})
    assert list(small.injected.values()) == [{"steps": 9, "rate": 1e-3}] and small.target.name.startswith("small-")
    write(root / "notebooks/02_second.ipynb", parameters="other = 1")
    run = study.Study(root, only=["02"], parameters={"steps": 4})
    assert run.without == {"steps": ["02_second"]} and list(run.injected.values()) == [{}]
    for only, expected in {"": "12", "02": "2", "01,02": "12", "01, 02_s": "12"}.items():
        assert [path.name[1] for path in study.Study(root, only=[only]).notebooks] == list(expected)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [({"parameters": [given]}, DataError, given.partition("=")[0]) for given in
     ("rate=fast", "rate=true", "sizes=3", "sizes=[a]", "name=1", "steps=1.5", "steps=true")]
    + [({"parameters": [given]}, FormatError, "-p") for given in ("steps", "=3", "sizes=[1", "a={")]
    + [({"parameters": ["say=2024-01-01"]}, DataError, "JSON"),
       ({"parameters": ["step=4"]}, UnknownNameError, "'step'.*Did you mean 'steps'"),
       ({"only": ["01,07"]}, UnknownNameError, "'07'.*01_first"),
       ({"profile": "smok"}, UnknownNameError, "Did you mean 'smoke'"),
       ({"out": ".", "parameters": ["steps=4"]}, DataError, "repository itself"),
       ({"root": "nowhere"}, DataError, "no notebooks")],
    ids=str,
)  # fmt: skip
def test_a_study_that_cannot_be_run_is_refused(root, given, error, message, monkeypatch):
    monkeypatch.chdir(root)
    with pytest.raises(error, match=message):
        study.Study(**{"root": root} | given | {"parameters": parse_assignments(given.get("parameters", []))})


def test_several_pages_at_a_time_then_those_that_take_times_then_those_that_read_tables(tmp_path):
    kinds = [("_", "reads-tables", ["a", "b", "x"]), ("x", "takes-times", ["a", "b"]), ("a", "", []), ("b", "", [])]
    for name, tag, before in kinds:
        parameters = f"sizes = {before}\nname = '{name}'"
        write(tmp_path / f"notebooks/{name}.ipynb", AFTER, parameters=parameters, tag=tag)
    assert study.Study(tmp_path, jobs=2).run() == {}
