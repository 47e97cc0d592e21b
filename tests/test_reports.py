"""What a run tells beside its console: the trackers, each by a flag and a package of that name."""

import sys
from types import SimpleNamespace

import pytest
from training import rows, run_here

from machinery import reports


class Tracker:
    """Takes the place of a tracker's package, and keeps what it was told."""

    def __init__(self):
        self.started, self.told, self.finished = [], [], 0

    def SummaryWriter(self, out):
        self.started.append(out)
        return SimpleNamespace(add_scalar=self.scalar, flush=lambda: None, close=self.finish)

    def init(self, **facts):
        self.started.append(facts)
        return SimpleNamespace(log=self.log)

    def scalar(self, key, value, step):
        self.log({key: value}, step)

    def log(self, values, step):
        self.told += [(step, key, value) for key, value in values.items()]

    def finish(self):
        self.finished += 1


@pytest.fixture(params=reports.TRACKERS)
def tracker(request, monkeypatch):
    tracker = Tracker()
    tracker.flag = request.param
    monkeypatch.setitem(sys.modules, reports.TRACKERS[request.param][0], tracker)
    return tracker


def fail(*_, **__):
    raise RuntimeError("no key\nat all")


def logged(out):
    """Return the values of log.jsonl as (step, key, value), but for those that are not known."""
    return [(row["step"], key, value) for row in rows(out, "step")
            for key, value in row.items() if value is not None]


def test_a_tracker_is_told_the_rows_of_the_log(data_dir, tmp_path, monkeypatch, tracker):
    monkeypatch.setattr(reports, "peak_memory_gb", lambda device: None)  # as on Windows
    flag = {tracker.flag: True}
    run_here(monkeypatch, data_dir, tmp_path, max_targets=512 * 3, decay_steps=9, **flag)
    assert tracker.told == logged(tmp_path) and tracker.finished == len(tracker.started) == 1
    if tracker.flag != "tensorboard":
        facts = tracker.started[0]
        assert facts["name"] == facts["group"] == tmp_path.name
        assert facts["config"]["seed"] == 1 and facts["config"]["data"] == str(data_dir)
    # It is free on resume, both ways.
    run_here(monkeypatch, data_dir, tmp_path, max_targets=512 * 4, decay_steps=9, resume=True)
    assert tracker.finished == 1
    run_here(monkeypatch, data_dir, tmp_path, max_targets=512 * 5, decay_steps=9, resume=True,
             **flag)
    assert tracker.finished == 2 and tracker.told[-3:] == logged(tmp_path)[-3:]


def test_a_tracker_that_fails_costs_its_rows_and_not_the_run(data_dir, tmp_path, monkeypatch,
                                                             tracker, capsys):
    tracker.log = tracker.finish = fail
    run_here(monkeypatch, data_dir, tmp_path, max_targets=512, **{tracker.flag: True})
    told = capsys.readouterr().err.splitlines()
    assert set(told) == {f"--{tracker.flag}: not told: no key"} and len(logged(tmp_path)) > 5


def test_a_tracker_that_does_not_start_is_told(data_dir, tmp_path, monkeypatch, tracker):
    tracker.SummaryWriter = tracker.init = fail
    with pytest.raises(ValueError, match=f"--{tracker.flag}: no key at all; (see|run)"):
        run_here(monkeypatch, data_dir, tmp_path / "a", **{tracker.flag: True})
    monkeypatch.setitem(sys.modules, reports.TRACKERS[tracker.flag][0], None)
    with pytest.raises(ValueError, match=f"not installed; pip install {tracker.flag}$"):
        run_here(monkeypatch, data_dir, tmp_path / "b", **{tracker.flag: True})
