"""Comparisons of runs: the statistics against closed forms and scipy, refusals, what is written."""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from test_compare import ends, output
from training import TINY

import compare
import evaluate
import train
from inputs import FixedCodes
from machinery import figures, labels, statistics
from machinery.records import read_runs
from machinery.runs import data_fingerprint
from model import ModelConfig

ROOT = Path(__file__).parents[1]
V, K = 3072, 12


def code_report(rng):
    """What train.py reports of V random K-bit codes."""
    bits = np.array([[int(b) for b in f"{i:012b}"] for i in rng.permutation(2**K)[:V]])
    distances = np.concatenate([(bits[i] != bits[i + 1:]).sum(1) for i in range(V)])
    counts, edges = np.histogram(16.0 * bits.sum(1), bins=40)
    return {"vocab_size": V, "n_bits": K, "bit_counts": bits.sum(0).tolist(),
            "weight_histogram": np.bincount(bits.sum(1), minlength=K + 1).tolist(),
            "distance_histogram": np.bincount(distances, minlength=K + 1).tolist(),
            "squared_norms": {
                "mean": 16 * bits.sum() / V, "min": 0, "max": 192,
                "histogram": {"edges": edges.tolist(), "counts": counts.tolist()}},
            "zero_ids": np.flatnonzero(~bits.any(1)).tolist()}


def write_run(folder, name, seed=1, cost=0.0, noise=0.01, report=None, **config):
    """Write a run, as training and a score leave it, `cost` nats above a common curve."""
    path = folder / name
    path.mkdir(parents=True)
    shared = np.random.default_rng(7)
    own = np.random.default_rng([seed, len(name), int(1000 * cost)])
    config = {"input": "learned", "seed": seed, "n_layer": 4, "n_embd": 192, "n_head": 4,
              "n_ffn": 512, "block_size": 256, "vocab_size": V, "max_targets": 40_000,
              "tokens_per_step": 4096, "max_lr": 0.003, "dtype": "float32", "out": str(path),
              "code_seed": 12345, "code_offset": "0", "data": "data/x",
              "data_fingerprint": "f" * 64,
              "initial_body_sha256": f"body {seed} {config.get('n_layer', 4)}",
              "parameters": {"input": 589_824, "body": 1_771_200, "head": 589_824, "buffers": 0,
                             "trainable": 2_950_848},
              "code_report": report} | config
    (path / "config.json").write_text(json.dumps(config))
    rows = []
    for step in range(11):
        decay = math.exp(-step / 3)
        loss = 3.4 + 4.6 * decay + cost * (1 + decay) + own.normal(0, noise)
        rows.append({"step": step, "targets": step * 4096, "val_loss": loss,
                     "val_bits_per_byte": loss})
        if step < 10:
            rows.append({"step": step + 1, "targets": step * 4096 + 4096, "loss": loss, "lr": 0.003,
                         "grad_norm": 1.0, "targets_per_second": 9000.0 + step})
    (path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    targets = shared.integers(50, 5000, 60)
    level = 3.4 + shared.normal(0, 0.5, 60) + cost + own.normal(0, noise, 60) + own.normal(0, noise)
    documents = [{"targets": int(t), "bytes": int(3 * t), "nats": t * nats}
                 for t, nats in zip(targets, level)]
    (path / "heldout-00000010.json").write_text(json.dumps({
        "step": 10, "dtype": "float32", "loss": (targets * level).sum() / targets.sum(),
        "bits_per_byte": 1.5, "data": "data/x", "documents": documents}))
    return path


@pytest.fixture
def six_runs(tmp_path):
    """learned and binary, 0.3 nats above it, with seeds 1, 2, 3."""
    return [write_run(tmp_path, f"{name}-s{seed}", seed, cost, input=name)
            for name, cost in (("learned", 0.0), ("binary", 0.3)) for seed in (1, 2, 3)]


def compare_runs(paths, *arguments, **settings):
    return compare.compare_runs(read_runs(paths), *arguments, **settings)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def command(*arguments, **options):
    words = [sys.executable, str(ROOT / "compare.py"), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, **options)


# --- statistics

@pytest.mark.parametrize("n", [2, 3, 10])
def test_student_interval_is_scipys(n):
    values = np.random.default_rng(n).normal(3, 1, n)
    mean, half = statistics.student_interval(values)
    theirs = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx(theirs)


def test_student_interval_of_three_by_hand():
    mean, half = statistics.student_interval([1.0, 2.0, 3.0])  # s = 1, t(0.975, 2) = 4.302653
    assert (mean, half) == pytest.approx((2.0, 4.302653 / math.sqrt(3)), abs=1e-6)
    assert statistics.student_interval([5.0]) == (5.0, None)


def interval(difference, weight=None, resamples=10_000):
    difference = np.array(difference, float)
    weight = np.ones(len(difference)) if weight is None else np.array(weight, float)
    return statistics.paired_subsets(difference, weight, resamples)[:2]


def test_interval_of_a_mean_is_nearly_scipys_bootstrap():
    d = np.random.default_rng(1).normal(1, 1, 40)
    theirs = stats.bootstrap((d,), np.mean, n_resamples=10_000, method="percentile",
                             random_state=np.random.default_rng(2)).confidence_interval
    assert interval(d) == pytest.approx(tuple(theirs), abs=0.03)  # the error of 10,000 resamples


def test_interval_of_a_ratio_is_nearly_scipys_bootstrap_and_the_linearised_one():
    rng = np.random.default_rng(3)
    weights = rng.integers(10, 1000, 300).astype(float)
    d = weights * rng.normal(0.3, 0.2, 300)

    def mean(d, w, axis):
        return d.sum(axis) / w.sum(axis)

    theirs = stats.bootstrap((d, weights), mean, paired=True, n_resamples=10_000,
                             method="percentile",
                             random_state=np.random.default_rng(4)).confidence_interval
    ratio = d.sum() / weights.sum()
    half = 1.959964 * math.sqrt(((d - ratio * weights) ** 2).sum()) / weights.sum()
    assert interval(d, weights) == pytest.approx(tuple(theirs), abs=2e-3)
    assert interval(d, weights) == pytest.approx((ratio - half, ratio + half), abs=2e-3)


def test_interval_is_deterministic_and_exact_where_it_can_be():
    d = np.random.default_rng(5).normal(0, 1, 1000)
    assert interval(d) == interval(d) != interval(d, resamples=200)
    assert interval(np.zeros(7)) == (0, 0)
    # A constant ratio has no spread.
    assert interval(0.25 * np.arange(1, 9), np.arange(1, 9)) == (0.25, 0.25)


def test_coverage_of_both_intervals_is_near_nominal():
    rng, n = np.random.default_rng(6), 500
    covered = 0
    for _ in range(n):
        weights = rng.integers(20, 2000, 80).astype(float)
        low, high = interval(weights * (0.1 + rng.standard_t(5, 80)), weights, 600)
        covered += low <= 0.1 <= high
    assert 0.915 <= covered / n <= 0.975
    covered = 0
    for _ in range(4000):
        mean, half = statistics.student_interval(rng.normal(1, 2, 3))
        covered += abs(mean - 1) <= half
    assert 0.94 <= covered / 4000 <= 0.96


# --- what is compared

@pytest.mark.parametrize("config, name", [
    ({"input": "learned", "code_seed": 7, "code_offset": "0"}, "learned"),
    ({"input": "gf2", "code_seed": 7, "code_offset": "0"}, "gf2 code 7"),
    ({"input": "gf2", "code_seed": 7, "code_offset": "2a"}, "gf2 code 7 offset 2a"),
    ({"input": "random", "code_seed": 3}, "random code 3"),
    ({"input": "binary", "code_seed": 9, "code_values": "01", "code_scale": "1", "lift": "tile",
      "table_free": False}, "binary"),
    ({"input": "binary", "code_values": "pm1", "code_scale": "matched"},
     "binary pm1 scale matched"),
    ({"input": "binary", "code_seed": 9, "code_width": 0}, "binary"),
    ({"input": "binary", "code_seed": 9, "code_width": 48}, "binary code 9 width 48"),
    ({"input": "random", "code_seed": 9, "code_width": 48}, "random code 9 width 48"),
    ({"input": "learned", "input_std": 0.02}, "learned"),
    ({"input": "learned", "input_std": 1.0}, "learned std 1"),
    ({"input": "binary", "lift": "interleave", "table_free": True},
     "binary interleave table-free")])
def test_labels(config, name):
    assert labels.label(config) == name


def test_comparison_of_known_runs(six_runs):
    learned, binary = compare_runs(six_runs)["groups"]
    assert (learned["name"], binary["name"], binary["seeds"]) == ("learned", "binary", [1, 2, 3])
    losses = [json.loads((path / "heldout-00000010.json").read_text())["loss"] for path in six_runs]
    differences = np.subtract(losses[3:], losses[:3])
    assert binary["differences"] == pytest.approx(differences)
    assert binary["difference"] == pytest.approx(differences.mean())
    error = differences.std(ddof=1) / math.sqrt(3)
    assert binary["seed_interval"] == pytest.approx(4.302653 * error)
    low, high = binary["document_interval"]
    assert low < binary["difference"] < high and abs(binary["difference"] - 0.3) < 0.05
    assert learned["difference"] == learned["seed_interval"] == 0
    assert learned["document_interval"] == (0, 0)
    assert binary["curve_targets"] == [4096 * i for i in range(11)]
    assert np.shape(binary["curve_differences"]) == (3, 11)
    assert binary["targets_per_second"] == pytest.approx(9004.5)


def test_documents_are_resampled_with_seeds_averaged_first(six_runs):
    """What differs between the seeds but not in their mean widens the seed interval alone."""
    before = compare_runs(six_runs)["groups"][1]
    for path, shift in zip(six_runs[3:], (0.2, -0.2, 0.0)):
        heldout = json.loads((path / "heldout-00000010.json").read_text())
        for document in heldout["documents"]:
            document["nats"] += shift * document["targets"]
        heldout["loss"] += shift
        edit(path / "heldout-00000010.json", **heldout)
    after = compare_runs(six_runs)["groups"][1]
    assert after["document_interval"] == pytest.approx(before["document_interval"])
    assert after["seed_interval"] > 5 * before["seed_interval"]


def test_the_same_scores_under_another_interface_differ_by_nothing(tmp_path):
    paths = [write_run(tmp_path, f"{name}-s{seed}", seed, input=name)
             for name in ("aaa", "bbb") for seed in (1, 2)]
    group = compare_runs(paths, "aaa")["groups"][1]
    assert group["differences"] == [0, 0] and group["seed_interval"] == 0
    assert group["document_interval"] == (0, 0)


def test_runs_without_a_partner_count_in_the_mean_but_not_in_the_difference(six_runs):
    binary = compare_runs(six_runs[1:])["groups"][1]  # learned has no seed 1
    assert binary["seeds"] == [1, 2, 3] and binary["differences"][0] != 0
    assert len(binary["differences"]) == 2 and len(binary["losses"]) == 3


@pytest.mark.parametrize("file, changes, named", [
    ("config.json", {"max_lr": 0.001}, "max_lr 0.003 / 0.001"),
    ("config.json", {"n_layer": 8}, "n_layer 4 / 8"),
    ("config.json", {"data_fingerprint": "0" * 64}, "data_fingerprint"),
    ("config.json", {"dtype": "bfloat16"}, "dtype float32 / bfloat16"),
    ("config.json", {"initial_body_sha256": "other"}, "initial_body_sha256 of seed 3"),
    ("config.json", {"streams": 4}, "streams None / 4"),
    ("config.json", {"input": "learned"}, "both learned of seed 3"),
    ("config.json", {"max_targets": 10**6}, "40,960 of 1,000,000"),
    ("config.json", {"seed": 2}, "seed 2"),
    ("heldout-00000010.json", {"step": 9}, "36,864 at its held-out score"),
    ("heldout-00000010.json", {"dtype": "bfloat16"},
     "dtype of the held-out score float32 / bfloat16"),
    ("heldout-00000010.json", {"max_length": 64}, "max_length of the held-out score None / 64"),
    ("heldout-00000010.json", {"documents": [{"targets": 5, "bytes": 9, "nats": 20.0}]},
     "60 / 1 validation documents")])
def test_refusals_name_the_field(six_runs, file, changes, named):
    edit(six_runs[-1] / file, **changes)
    with pytest.raises(ValueError, match=named):
        compare_runs(six_runs)


def test_what_only_says_where_and_how_it_ran_may_differ(six_runs):
    edit(six_runs[-1] / "config.json", device="cuda", micro_batch=4, data="elsewhere", compile=True,
         parameters={}, preset=None, parallel="fsdp", keep_every=5)
    edit(six_runs[-1] / "heldout-00000010.json", data="elsewhere")
    assert len(compare_runs(six_runs)["groups"]) == 2


def test_gap_against_depth(tmp_path):
    paths = []
    for n_layer in (8, 2):
        for name, cost in (("binary", 1.0), ("learned", 0.0)):
            for seed in (1, 2):
                paths.append(write_run(tmp_path, f"{name}-{n_layer}-s{seed}", seed, cost / n_layer,
                                       input=name, n_layer=n_layer))
    with pytest.raises(ValueError, match="n_layer 8 / 2"):
        compare_runs(paths)
    groups = compare_runs(paths, by="n_layer")["groups"]
    assert [(g["name"], round(g["difference"], 1)) for g in groups] == [
        ("learned, n_layer 2", 0), ("learned, n_layer 8", 0),
        ("binary, n_layer 2", 0.5), ("binary, n_layer 8", 0.1)]
    with pytest.raises(ValueError, match="no run to pair with binary at n_layer=2"):
        compare_runs(paths[:-2], by="n_layer")


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])  # None: as JSON has it
@pytest.mark.parametrize("where", ["loss", "bits_per_byte", "nats"])
def test_a_held_out_score_that_is_not_finite_is_refused(six_runs, where, bad):
    path = six_runs[4] / "heldout-00000010.json"
    heldout = json.loads(path.read_text())
    if where == "nats":
        heldout["documents"][7]["nats"] = bad
    else:
        heldout[where] = bad
    path.write_text(json.dumps(heldout))
    with pytest.raises(ValueError, match="binary-s2.*not finite"):
        compare_runs(six_runs)


def test_a_curve_that_is_not_finite_is_null(six_runs, tmp_path, monkeypatch, capsys):
    """The held-out losses are still compared, and what is written is JSON."""
    log = six_runs[0] / "log.jsonl"
    rows = log.read_text().splitlines()
    rows[2] = json.dumps(json.loads(rows[2]) | {"val_loss": math.nan})
    log.write_text("\n".join(rows) + "\n")
    said = output(monkeypatch, capsys, *six_runs, "--format=json", f"--out={tmp_path}/c")
    for text in (said, (tmp_path / "c/runs.jsonl").read_text()):
        assert "NaN" not in text and "null" in text
    assert json.loads(said)["groups"][1]["seed_interval"] > 0


@pytest.mark.parametrize("field", ["n_layers", "parameters", "code_report", "nonsense"])
def test_by_is_a_field_that_can_be_shown(six_runs, tmp_path, field, monkeypatch, capsys):
    assert ends(monkeypatch, capsys, *six_runs, f"--by={field}", f"--out={tmp_path}/none") == 1
    said = capsys.readouterr().err
    assert f"--by={field}" in said and said.count("\n") == 1 and not (tmp_path / "none").exists()
    assert ("n_layer?" in said) == (field == "n_layers")


def test_by_a_field_that_a_run_does_not_have_is_refused(six_runs):
    config = json.loads((six_runs[1] / "config.json").read_text())
    del config["max_lr"]
    (six_runs[1] / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="learned-s2.* no max_lr"):
        compare_runs(six_runs, by="max_lr")


def test_by_a_field_of_words(tmp_path):
    paths = [write_run(tmp_path, f"{name}-{ffn}", cost=cost, input=name, ffn=ffn)
             for name, cost in (("learned", 0.0), ("binary", 0.3)) for ffn in ("gelu", "swiglu")]
    result = compare_runs(paths, by="ffn")
    assert [g["name"] for g in result["groups"]][-1] == "binary, ffn swiglu"
    assert "gap" in figures.draw_runs(result, tmp_path)


def test_scores_of_other_data_are_refused(six_runs):
    """Documents of other data may have the same lengths, and be as many."""
    for path in six_runs:
        edit(path / "heldout-00000010.json", data_sha256="f" * 64)
    assert len(compare_runs(six_runs)["groups"]) == 2
    edit(six_runs[4] / "heldout-00000010.json", data_sha256="0" * 64)
    with pytest.raises(ValueError, match="binary-s2.* held-out score is of other data.*000000"):
        compare_runs(six_runs)


def test_the_score_of_the_runs_own_data_is_taken(six_runs):
    """Beside it may lie those of other data, dtypes and lengths, named by them."""
    before = compare_runs(six_runs)["groups"]
    own = six_runs[4] / "heldout-00000010.json"
    for name in ("heldout-00000010-bfloat16", "heldout-00000010-data01234567"):
        (own.parent / f"{name}.json").write_text(own.read_text())
        edit(own.parent / f"{name}.json", loss=9.0, dtype="bfloat16", data_sha256="0" * 64)
    assert compare_runs(six_runs)["groups"] == before
    own.unlink()
    (own.parent / "heldout-00000010-bfloat16.json").unlink()
    with pytest.raises(ValueError, match=" 0 at its held-out score"):
        compare_runs(six_runs)


def test_scores_of_data_named_by_path_are_of_the_same_data(six_runs, tmp_path):
    """Held-out scores once named their data by path only."""
    meta = {"format": 1, "sources": [], "tokenizer": {"sha256": "1" * 64},
            "shards": [{"train": "a", "val": "b"}]}
    for path in six_runs:
        edit(path / "config.json", data_fingerprint=data_fingerprint(meta))
    assert len(compare_runs(six_runs)["groups"]) == 2
    edit(six_runs[4] / "heldout-00000010.json", data=str(tmp_path / "moved"))
    with pytest.raises(ValueError, match="binary-s2.* no more to be read; score it again"):
        compare_runs(six_runs)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/meta.json").write_text(json.dumps(meta))
    assert len(compare_runs(six_runs)["groups"]) == 2
    meta["shards"][0]["val"] = "c"
    (tmp_path / "moved/meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="binary-s2.* held-out score is of other data"):
        compare_runs(six_runs)


def damage(path, how):
    """Leave at path what a reader may find there."""
    if how == "missing":
        path.unlink()
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "cut": path.read_bytes()[:40], "a list": b"[1, 2]",
                          "other keys": b'{"a": 1}', "a number": b"3", "latin-1": b'{"a": "\xe9"}',
                          "a null": b"null", "wrong kinds": b'{"input": 3, "documents": 3, '
                          b'"step": "x", "tokens_per_step": null, "max_targets": "9"}'}[how])


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "heldout-00000010.json"])
@pytest.mark.parametrize("how", ["missing", "a directory", "empty", "cut", "a list", "other keys",
                                 "a number", "latin-1", "a null", "wrong kinds"])
def test_every_damage_to_a_run_ends_in_one_line(six_runs, name, how, monkeypatch, capsys):
    damage(six_runs[1] / name, how)
    assert ends(monkeypatch, capsys, *six_runs) == 1
    said = capsys.readouterr().err
    assert str(six_runs[1]) in said and said.count("\n") == 1


def environment(**changes):
    return {**os.environ, **changes}


def test_a_notebooks_back_end_does_not_matter(six_runs, tmp_path):
    notebook = environment(MPLBACKEND="module://matplotlib_inline.backend_inline")
    done = command(*six_runs, f"--out={tmp_path}/c", env=notebook)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c/gap.png").exists()


@pytest.mark.parametrize("locale", [dict(PYTHONIOENCODING="ascii"),
                                    dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")])
def test_an_ascii_console_is_served(six_runs, tmp_path, locale):
    """What it cannot show is replaced; files are UTF-8 all the same."""
    done = command(*six_runs, f"--out={tmp_path}/c", env=environment(**locale))
    assert done.returncode == 0, done.stderr
    assert "?0." in done.stdout and "±0." in (tmp_path / "c/comparison.md").read_text("utf-8")


def test_names_with_accents_are_read_in_any_locale(six_runs, tmp_path):
    edit(six_runs[0] / "config.json", note="déjà vu")
    text = (six_runs[0] / "config.json").read_text()
    (six_runs[0] / "config.json").write_text(text.replace("\\u00e9", "é"), encoding="utf-8")
    for path in six_runs[1:]:
        edit(path / "config.json", note="déjà vu")
    plain = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = command(*six_runs, f"--out={tmp_path}/c", env=plain)
    assert done.returncode == 0, done.stderr


def test_home_and_a_slash_at_the_end(six_runs, tmp_path):
    runs = [f"~/{path.name}/" for path in six_runs]
    home = environment(HOME=str(tmp_path))
    done = command(*runs, "--out=~/figures/", env=home, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures/comparison.md").exists() and not (tmp_path / "~").exists()


def test_a_file_in_the_way_is_told_before_the_work(six_runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").write_text("mine")
    assert ends(monkeypatch, capsys, *six_runs, f"--out={tmp_path}/taken") == 1
    printed, said = capsys.readouterr()
    assert printed == "" and said.count("\n") == 1 and "taken: a file is there" in said
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_package_that_is_missing_is_named(six_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert ends(monkeypatch, capsys, *six_runs, f"--out={tmp_path}/c") == 1
    said = capsys.readouterr().err
    assert "matplotlib" in said and "requirements.txt" in said and said.count("\n") == 1


# --- what is written

def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


def test_report_and_figures(tmp_path, six_runs, monkeypatch, capsys):
    report = code_report(np.random.default_rng(0))
    for path in six_runs[3:]:
        edit(path / "config.json", code_report=report)
    out = tmp_path / "comparison"
    said = output(monkeypatch, capsys, *six_runs, f"--out={out}")
    text, result = (out / "comparison.md").read_text(), compare_runs(six_runs)
    assert {path.name for path in out.iterdir()} == {
        "comparison.md", "runs.jsonl", "loss.png", "differences.png", "gap.png", "codes.png",
        "pareto.png"}
    for figure in out.glob("*.png"):
        assert png_size(figure)[0] == 2 * 830 and f"({figure.name})" in text
    binary = result["groups"][1]
    row = next(line for line in text.splitlines() if line.startswith("| binary"))
    difference = f"{binary['difference']:+.4f}"
    assert f"{binary['loss']:.4f} ±" in row and difference in row
    assert difference in said
    assert "1,771,200" in text and "60 validation documents" in text
    assert result["experiment"]["max_lr"] == 0.003


def test_figures_of_wide_codes_leave_out_what_is_not_known(tmp_path):
    reports = [FixedCodes(ModelConfig("binary", 300, n_embd=48, n_head=2, code_width=48)).report(),
               FixedCodes(ModelConfig("random", 300, n_embd=36, n_head=2)).report()]
    paths = [write_run(tmp_path, "learned")]
    paths += [write_run(tmp_path, f"wide{i}", cost=0.1, input="binary", code_width=i, report=report)
              for i, report in enumerate(reports)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "codes" in figures.draw_runs(compare_runs(paths), tmp_path)


def test_one_seed_has_no_seed_interval(six_runs):
    result = compare_runs(six_runs[::3])
    assert result["groups"][1]["seed_interval"] is None
    assert "one seed" in compare.describe_runs(result, True)


def look(style):
    return style["color"], style["linestyle"], style["marker"]


def groups_of(labels, by=(None,)):
    """What line_styles reads of the groups of these labels at each value of by."""
    return [{"name": f"{label}, n_layer {value}" if value else label, "label": label, "by": value}
            for label in labels for value in by]


MANY = ["learned", "tied", "binary", "binary pm1", "binary scale matched", "lowdim", "sinusoid",
        "mine", "theirs", "random code 1", "random code 2", *(f"gf2 code {i}" for i in range(9))]


@pytest.mark.parametrize("by", [(None,), (2, 4, 8)])
def test_no_two_lines_look_alike(by):
    groups = groups_of(MANY, by)
    styles = figures.line_styles(groups)
    assert len({look(style) for style in styles.values()}) == len(groups)
    for value in by:  # the line of a label against by is told from another label's without marks
        names = [g["name"] for g in groups if g["by"] == value]
        assert len({look(styles[name])[:2] for name in names}) == len(MANY)


def test_an_input_has_the_same_colour_in_every_figure():
    """Whatever else is compared, and in whatever order."""
    first = figures.line_styles(groups_of(MANY))
    again = figures.line_styles(groups_of(["tied", "random code 1", "binary pm1", "learned"]))
    for name, style in again.items():
        assert style["color"] == first[name]["color"], name
    assert first["learned"]["color"] == "#000000"
    assert len({first[f"gf2 code {i}"]["color"] for i in range(4)}) == 1


def test_only_seeds_are_ticks(six_runs):
    """The ends of an interval are not marked as single seeds are."""
    group = compare_runs(six_runs)["groups"][1]
    figure = figures.draw_differences([group], figures.line_styles([group]), "learned")
    ticks = [line for line in figure.axes[0].lines if line.get_marker() == "|"]
    assert [list(line.get_xdata()) for line in ticks] == [group["differences"]]


def test_against_depth_each_label_has_its_line(tmp_path):
    paths = []
    for n_layer in (2, 4):
        for seed in (1, 2):
            for name, code in (("learned", 1), ("gf2", 1), ("gf2", 2)):
                paths.append(write_run(tmp_path, f"{name}{code}-{n_layer}-{seed}", seed, code / 10,
                                       input=name, n_layer=n_layer, code_seed=code))
    groups = compare_runs(paths, by="n_layer")["groups"]
    styles = figures.line_styles(groups)
    gf2 = [g for g in groups if g["label"] != "learned"]
    figure = figures.draw_gap(gf2, styles, "learned", "n_layer")
    lines = [line for line in figure.axes[1].lines if len(line.get_xdata()) == 2
             and line.get_linestyle() != "None" and list(line.get_xdata()) == [2, 4]]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 2
    words = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert words == ["gf2 code 1", "gf2 code 2"]


# --- real runs, from the command line

@pytest.fixture(scope="module")
def real_runs(data_dir, tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("runs"), []
    with pytest.MonkeyPatch.context() as patch:
        for name, seed in (("learned", 1), ("learned", 2), ("binary", 1), ("binary", 2)):
            paths.append(folder / f"{name}-s{seed}")
            flags = [f"--data={data_dir}", f"--out={paths[-1]}", f"--input={name}",
                     f"--seed={seed}", "--max_targets=10_240"]
            patch.setattr(sys, "argv", ["train.py", *TINY, *flags])
            train.main()
        patch.setattr(sys, "argv", ["evaluate.py", "score", *map(str, paths)])
        evaluate.main()
    return paths


def test_real_runs(real_runs, tmp_path):
    done = command(*real_runs, f"--out={tmp_path}/c")
    assert done.returncode == 0, done.stderr
    learned, binary = compare_runs(real_runs)["groups"]
    assert compare_runs([tmp_path / "c/runs.jsonl"])["groups"] == [learned, binary]
    scores = [json.loads((path / "heldout-00000020.json").read_text()) for path in real_runs]
    losses = [score["loss"] for score in scores]
    assert learned["losses"] + binary["losses"] == losses
    assert binary["difference"] == pytest.approx(np.mean(losses[2:]) - np.mean(losses[:2]))
    low, high = binary["document_interval"]
    assert low < binary["difference"] < high and binary["curve_targets"] == [0, 5120, 10240]


def test_mistakes_end_in_one_line(real_runs, tmp_path):
    for arguments, code, words in (((tmp_path,), 1, "no config.json"),
                                   ((*real_runs, "--baseline=gf2"), 1, "there are learned (seeds"),
                                   ((), 2, "RUN"),
                                   ((real_runs[0], "--bye=n_layer"), 2, "--bye")):
        done = command(*arguments, f"--out={tmp_path}/none")
        assert done.returncode == code and words in done.stderr and done.stderr.count("\n") == 1
        assert not (tmp_path / "none").exists()
