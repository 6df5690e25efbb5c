"""Calls on a Dask cluster of two processes: workers that die, calls that fail, schedulers that are not there."""

import gc
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
import sweep_cases as cases
from typer.testing import CliRunner

from vqkv import cluster, study, sweep
from vqkv.errors import DataError, UnknownNameError


@pytest.fixture(scope="module")
def address():
    with cluster.local_cluster(2) as found:
        yield found


def calls(folder, count=5):
    return {f"call {x}": (x, str(folder)) for x in range(count)}


def expected(folder, count=5):
    return {name: cases.cube(*arguments) for name, arguments in calls(folder, count).items()}


def test_every_result_once(address, tmp_path):
    assert dict(cluster.run(address, cases.cube, calls(tmp_path))) == expected(tmp_path)
    assert [cases.marks(tmp_path, x) for x in range(5)] == [2] * 5  # one of them by expected()


def test_a_call_goes_on_elsewhere_when_its_worker_is_killed(address, tmp_path):
    found = dict(cluster.run(address, cases.killed_once, calls(tmp_path)))
    assert found == expected(tmp_path) and cases.marks(tmp_path, "begun-2") >= 2


def test_a_call_that_kills_every_worker_is_named_and_not_repeated_for_ever(address, tmp_path):
    with pytest.raises(cluster.ClusterError, match=r"call 1 killed every worker that ran it, 3 one after another"):
        list(cluster.run(address, cases.deadly, calls(tmp_path, 2)))
    assert cases.marks(tmp_path, "deaths") == cluster.TRIES
    assert dict(cluster.run(address, cases.cube, calls(tmp_path))) == expected(tmp_path)  # the cluster lives on


def test_what_a_call_raises_is_raised_here_with_its_name(address, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere") as caught:
        list(cluster.run(address, cases.cube, {"odd call": (1, str(tmp_path / "nowhere"))}))
    assert caught.value.__notes__ == ["in odd call"]


def test_no_workers(monkeypatch):
    from distributed import LocalCluster

    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(cluster, "PATIENCE_SECONDS", 0)
    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as empty,
        pytest.raises(
            cluster.ClusterError, match=r"no worker for 0 seconds; begun: call 0. Start some with `dask worker"
        ),
    ):
        list(cluster.run(empty.scheduler_address, cases.cube, calls("x")))


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:1", "nonsense", "tcp://"])
def test_a_scheduler_that_is_not_there_is_named(wrong, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1)
    with pytest.raises(DataError, match=f"no Dask scheduler answers at {wrong!r}.*dask scheduler"):
        list(cluster.run(wrong, cases.cube, {}))
    run = CliRunner().invoke(study.app, ["--only", "01", "--scheduler", wrong])
    assert run.exit_code == 2 and wrong in run.output


def test_no_half_made_client_is_left_to_the_garbage_collector(monkeypatch):
    """Which, amid the making of another, would wait for ever for a lock that this one holds (distributed's LoopRunner):
    a run of the tests hung so."""
    Client = pytest.importorskip("distributed").Client
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1)
    gc.collect()
    before = sum(isinstance(x, Client) for x in gc.get_objects())
    gc.disable()
    try:
        with pytest.raises(DataError):
            list(cluster.run("tcp://127.0.0.1:1", cases.cube, {}))
        assert sum(isinstance(x, Client) for x in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_sweep_has_the_same_rows_here_and_there_also_when_a_worker_is_killed(address, tmp_path, monkeypatch):
    settings, wanted = {"folder": str(tmp_path)}, [{"x": x} for x in range(6)]
    here = sweep.sweep(cases.cube, wanted, settings, "toy")
    monkeypatch.setenv("VQKV_SCHEDULER", address)
    assert sweep.sweep(cases.killed_once, wanted, settings, "toy") == here
    assert cases.marks(tmp_path, "begun-2") >= 2
    with pytest.raises(FileNotFoundError) as caught:
        sweep.sweep(cases.cube, wanted, {"folder": str(tmp_path / "nowhere")}, "toy")
    assert "in toy, case " in caught.value.__notes__[0]
    monkeypatch.setattr(sweep, "CODE", "other")
    with pytest.raises(DataError, match="another version of vqkv"):
        sweep.sweep(cases.cube, wanted, settings, "toy")


def test_steering(monkeypatch):
    started = []

    @contextmanager
    def local_cluster(workers):
        started.append(workers)
        yield "somewhere"

    monkeypatch.setattr(sweep, "local_cluster", local_cluster)
    with sweep.cluster() as nowhere:
        assert nowhere is None
    monkeypatch.setenv("VQKV_WORKERS", "2")
    with sweep.cluster() as here:
        assert here == "somewhere" and started == [2]
    monkeypatch.setenv("VQKV_SCHEDULER", "tcp://there:1")
    with pytest.raises(DataError, match="set one of them"):
        sweep.cluster()
    monkeypatch.delenv("VQKV_WORKERS")
    with sweep.cluster() as there:
        assert there == "tcp://there:1"
    for wrong in ("two", "0", "-1", 1.0):
        with pytest.raises(DataError, match=r"workers: use a whole number from 1 on"), cluster.local_cluster(wrong):
            pass


def test_the_study_starts_one_cluster_and_its_kernels_find_it(tmp_path, monkeypatch):
    source = "import os; print(os.environ.get('VQKV_SCHEDULER'), repr(os.environ.get('VQKV_WORKERS')))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    Path(tmp_path, "notebooks").mkdir()
    nbformat.write(study.strip(notebook), tmp_path / "notebooks/01_first.ipynb")

    @contextmanager
    def local_cluster(workers):
        yield f"started-{workers}"

    monkeypatch.setattr(study, "local_cluster", local_cluster)
    assert study.Study(tmp_path, workers=3).run() == {}
    assert "started-3 ''" in (tmp_path / "notebooks/01_first.ipynb").read_text()
    timed = nbformat.v4.new_code_cell("rounds = 1", metadata={"tags": ["parameters"]})
    notebook.cells.insert(0, timed)
    nbformat.write(study.strip(notebook), tmp_path / "notebooks/02_timed.ipynb")
    assert (
        study.Study(tmp_path, workers=3, jobs=2).run() == {}
    )  # with several pages at a time, for those that run alone
    assert "started" not in (tmp_path / "notebooks/01_first.ipynb").read_text()
    assert "started-3 ''" in (tmp_path / "notebooks/02_timed.ipynb").read_text()
    with pytest.raises(DataError, match="name one of them"):
        study.Study(tmp_path, workers=3, scheduler="tcp://there:1")


def test_without_distributed_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    for use in (lambda: cluster.check("", 2), lambda: cluster.check("tcp://there:1", 0)):
        with pytest.raises(ImportError, match=r"pip install 'vqkv\[cluster\]'"):
            use()
    cluster.check("", 0)


def test_errors_survive_the_way_between_processes(address, tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_SCHEDULER", address)
    with pytest.raises(UnknownNameError) as caught:
        sweep.sweep(cases.misspelt, [{"x": 1}], {"folder": str(tmp_path)}, "toy")
    assert str(caught.value) == "unknown preset 'vqlm'. Did you mean 'vqllm'? Known: vqllm."
    assert caught.value.__notes__ == ["in toy, case 1 of 1 (x=1)"]
    with pytest.raises(Exception, match=r"OSError\('disk 1 of .*'\)") as caught:  # its words, where it cannot be sent
        sweep.sweep(cases.unsendable, [{"x": 1}], {"folder": str(tmp_path)}, "toy")
    assert "in toy, case 1 of 1" in caught.value.__notes__[0]
