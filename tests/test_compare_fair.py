"""Fair comparisons: labels, the best learning rate of each, effects of one thing, runs.jsonl."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from test_compare import ends
from test_compare_runs import ROOT, code_report, compare_runs, edit, write_run

import compare
import model
from machinery import figures, labels
from machinery.records import read_runs, write_runs
from machinery.tables import to_json

SIZES = dict(base=16, rank=16, inner_width=128, hashes=2, buckets=1024, positions=32)


def write(folder, name, seed, validation, heldout=None, **config):
    """Write a run whose last validation loss and held-out loss (None: not scored) are given; eight
    held-out documents of 100 targets each."""
    path = write_run(folder, name, seed, eval_windows=64, **config)
    rows = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    assert "val_loss" in rows[-1]
    rows[-1]["val_loss"] = validation
    (path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    score = path / "heldout-00000010.json"
    if heldout is None:
        score.unlink()
    else:
        documents = [{"targets": 100, "bytes": 300, "nats": 100 * heldout}] * 8
        edit(score, loss=heldout, documents=documents)
    return path


def text_of(monkeypatch, capsys, *arguments):
    assert ends(monkeypatch, capsys, *arguments) == 0
    return capsys.readouterr().out


# --- labels

@pytest.mark.parametrize("config, name", [
    ({"input": "digits", "base": 16}, "digits base 16"),
    ({"input": "digits", "base": 2, "input_std": 1.0}, "digits base 2 std 1"),
    ({"input": "factored", "rank": 16}, "factored rank 16"),
    ({"input": "alone", "inner_width": 128}, "alone inner 128"),
    ({"input": "alone", "inner_width": 64, "code_width": 48}, "alone inner 64 code 12345 width 48"),
    ({"input": "hashed", "hashes": 2, "buckets": 1024}, "hashed 2 x 1024"),
    ({"input": "hashed", "code_seed": 7}, "hashed 2 x 1024 code 7"),
    ({"input": "spelling", "positions": 8}, "spelling 8 positions"),
    ({"input": "projected"}, "projected"),
    ({"input": "projected", "code_seed": 7}, "projected"),
    ({"input": "projected", "code_width": 48}, "projected code 12345 width 48"),
    ({"input": "random", "code_width": 12}, "random code 12345"),  # as many as without the flag
    ({"input": "binary", "code_width": 12, "code_seed": 7}, "binary"),
    ({"input": "random", "code_scale": "2e-2"}, "random code 12345 scale 0.02"),
    ({"input": "random", "code_scale": "1.0"}, "random code 12345"),
    ({"input": "lowdim", "input_std": 0.2, "code_width": 48}, "lowdim width 48 std 0.2"),
    ({"input": "mine", "code_seed": 12345}, "mine"),
    ({"input": "mine", "code_seed": 7}, "mine code 7")])
def test_labels_of_every_interface(config, name):
    whole = {"vocab_size": 3072, "n_embd": 192, "code_seed": 12345, "code_offset": "0",
             "code_values": "01", "code_scale": "1", "lift": "tile", "table_free": False,
             "code_width": 0, "input_std": 0.02} | SIZES
    assert labels.label(whole | config) == name


def test_fields_that_an_older_run_does_not_have_are_the_usual_ones(tmp_path):
    old = {"input": "binary", "code_seed": 12345, "code_offset": "0", "vocab_size": 3072}
    new = {"code_values": "01", "code_scale": "1", "lift": "tile", "table_free": False,
           "code_width": 0, "input_std": 0.02} | SIZES
    assert labels.label(old) == labels.label(old | new) == "binary"
    assert labels.places(old) == labels.places(old | new)
    paths = [write(tmp_path, "a", 1, 4.0, 4.0, **new), write(tmp_path, "b", 1, 4.5, 4.5, **old)]
    assert [g["name"] for g in compare_runs(paths)["groups"]] == ["learned", "binary"]


def test_a_sweep_over_many_axes_gets_as_many_labels():
    axes = {"input": ["random", "binary"], "code_seed": [1, 2], "code_width": [24, 48],
            "code_scale": ["1", "0.02", "matched"], "lift": ["tile", "interleave"],
            "code_values": ["01", "pm1"]}
    runs = [dict(zip(axes, values), vocab_size=3072, n_embd=192)
            for values in itertools.product(*axes.values())]
    assert len({labels.label(run) for run in runs}) == len(runs) == 96


def test_every_field_of_an_input_makes_a_label():
    """Another one would be taken for another experiment, or two runs for one."""
    assert set(model.ONLY_FOR) | {"code_seed"} <= set(labels.LABELS)
    for field, (_, usual) in labels.LABELS.items():
        if usual is not None:
            assert str(getattr(model.ModelConfig, field)) == usual
    assert float(labels.MATCHED) == model.INIT_STD


def test_a_field_that_older_runs_lack_can_be_named(tmp_path):
    paths = [write(tmp_path, name, 1, 4.0, 4.0, input=name) for name in ("learned", "binary")]
    result = compare_runs(paths, by="code_width")
    assert [g["by"] for g in result["groups"]] == [0, 0]


def test_budgets_can_be_compared_where_the_learning_rate_ends_with_them(tmp_path):
    """config.json has decay_steps as the update that it came to."""
    paths = []
    for name, cost in (("learned", 0.0), ("binary", 0.5)):
        for targets, steps in ((40_960, 10), (20_480, 5)):
            path = write(tmp_path, f"{name}-{targets}", 1, 4.0, 4.0 + cost, input=name,
                         max_targets=targets, warmup_steps=2, decay_steps=steps)
            log = path / "log.jsonl"
            log.write_text("".join(log.read_text().splitlines(keepends=True)[:2 * steps + 1]))
            edit(path / "heldout-00000010.json", step=steps)
            paths.append(path)
    result = compare_runs(paths, by="max_targets")
    assert [(g["by"], g["difference"]) for g in result["groups"][2:]] == [(20_480, 0.5),
                                                                         (40_960, 0.5)]
    axis = figures.make_figures(result)["gap"].axes[1]
    assert axis.get_xscale() == "log" and list(axis.get_xticks()) == [20_480, 40_960]
    edit(paths[1] / "config.json", decay_steps=4)
    with pytest.raises(ValueError, match="decay_steps 0 / 4"):
        compare_runs(paths, by="max_targets")


# --- the best value of a field

def tuned_runs(tmp_path):
    """learned at three learning rates, tuned on seed 1, with more seeds at the best; binary at two.

    By the held-out loss the choice would be another one.
    """
    return [write(tmp_path, "l1", 1, 4.0, max_lr=1e-3),
            write(tmp_path, "l2", 1, 3.8, 3.9, max_lr=2e-3),
            write(tmp_path, "l2-s2", 2, 5.0, 4.1, max_lr=2e-3),
            write(tmp_path, "l2-s3", 3, 5.0, 4.3, max_lr=2e-3),
            write(tmp_path, "l4", 1, 3.9, 1.0, max_lr=4e-3),
            write(tmp_path, "b2", 1, 4.4, input="binary", max_lr=2e-3),
            write(tmp_path, "b4", 1, 4.2, 4.4, input="binary", max_lr=4e-3),
            write(tmp_path, "b4-s2", 2, 4.2, 4.5, input="binary", max_lr=4e-3)]


@pytest.fixture
def tuned(tmp_path):
    return tuned_runs(tmp_path)


def test_the_best_by_validation_loss_over_shared_seeds_is_reported_with_all_its_seeds(tuned):
    result = compare_runs(tuned, best_over=["max_lr"])
    learned, binary = result["groups"]
    assert learned["choice"] == {
        "value": [0.002], "shared": [1], "edge": "", "tried": [
            {"value": [0.001], "seeds": [1], "loss": 4.0, "losses": [4.0]},
            {"value": [0.002], "seeds": [1, 2, 3], "loss": 3.8, "losses": [3.8, 5.0, 5.0]},
            {"value": [0.004], "seeds": [1], "loss": 3.9, "losses": [3.9]}]}
    assert learned["losses"] == [3.9, 4.1, 4.3] and learned["loss"] == pytest.approx(4.1)
    assert (binary["choice"]["value"], binary["choice"]["edge"]) == ([0.004], "largest")
    assert binary["differences"] == pytest.approx([0.5, 0.4])  # 4.4 - 3.9, 4.5 - 4.1
    assert binary["difference"] == pytest.approx(0.45)
    # Student's t of two differences that are 0.1 apart: t(0.975, 1) s / sqrt(2), s = 0.1 / sqrt(2)
    assert binary["seed_interval"] == pytest.approx(12.7062 * 0.05, rel=1e-5)
    assert binary["document_interval"] == pytest.approx((0.45, 0.45))
    assert "max_lr" not in result["experiment"]


def test_of_equal_values_the_smaller_is_taken(tmp_path):
    paths = [write(tmp_path, f"{lr}", 1, 4.0, 4.0, max_lr=lr) for lr in (4e-3, 1e-3, 2e-3)]
    found = compare_runs(paths, best_over=["max_lr"])["groups"][0]["choice"]
    assert (found["value"], found["edge"]) == ([0.001], "smallest")


def test_a_lucky_seed_that_the_others_lack_does_not_choose(tuned, tmp_path):
    more = [write(tmp_path, "l4-s2", 2, 0.1, max_lr=4e-3)]
    found = compare_runs(tuned + more, best_over=["max_lr"])["groups"][0]["choice"]
    assert (found["value"], found["shared"]) == ([0.002], [1])


def test_where_all_values_have_all_seeds_their_mean_chooses(tmp_path):
    """Seed 1 alone would choose the other."""
    losses = {(1e-3, 1): 4.0, (1e-3, 2): 4.6, (2e-3, 1): 4.1, (2e-3, 2): 4.3}
    paths = [write(tmp_path, f"{lr}-{seed}", seed, loss, loss, max_lr=lr)
             for (lr, seed), loss in losses.items()]
    found = compare_runs(paths, best_over=["max_lr"])["groups"][0]["choice"]
    assert found["value"] == [0.002] and found["shared"] == [1, 2]
    assert [row["loss"] for row in found["tried"]] == pytest.approx([4.3, 4.2])


@pytest.mark.parametrize("best, words", [
    (1e-3, "0.001, the smallest of 0.001, 0.002, 0.004"), (2e-3, "0.002 of 0.001, 0.002, 0.004"),
    (4e-3, "0.004, the largest of 0.001, 0.002, 0.004")])
def test_what_was_tried_and_its_edge_are_said(tmp_path, best, words):
    paths = [write(tmp_path, f"{lr}", 1, 4.0 - (lr == best), 4.0, max_lr=lr)
             for lr in (1e-3, 2e-3, 4e-3)]
    paths.append(write(tmp_path, "b", 1, 4.0, 4.5, input="binary", max_lr=1e-3))
    result = compare_runs(paths, best_over=["max_lr"])
    for markdown in (False, True):
        text = compare.describe_runs(result, markdown)
        rows = [line.strip("| ") for line in text.splitlines()]
        header = next(row for row in rows if "held-out loss (nats)" in row)
        assert header.endswith("best max_lr")
        assert next(row for row in rows if row.startswith("learned")).endswith(words)
        only = next(row for row in rows if row.startswith("binary"))
        assert only.endswith("0.001, the only one tried")
        assert "Only input, seed, max_lr differ" in text and "64 validation windows" in text


def test_chosen_runs_without_a_score_are_named_with_the_command(tuned, monkeypatch, capsys):
    for name in ("l2-s3", "b4"):
        (tuned[0].parent / name / "heldout-00000010.json").unlink()
    assert ends(monkeypatch, capsys, *tuned, "--best_over=max_lr") == 1
    said = capsys.readouterr().err
    folder = tuned[0].parent
    assert said.count("\n") == 1 and "2 of the 5 chosen runs" in said
    assert said.rstrip().endswith(f"python evaluate.py score {folder}/l2-s3 {folder}/b4")


def test_an_unfinished_run_is_named(tuned, monkeypatch, capsys):
    """It might be the best one."""
    log = tuned[0] / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-4]))
    assert ends(monkeypatch, capsys, *tuned, "--best_over=max_lr") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{tuned[0]}: 32,768 of 40,000 targets trained" in said


def test_a_last_loss_that_was_not_evaluated_is_told(tuned):
    log = tuned[0] / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="l1: 40,960 of 40,000 .* 36,864 at its last validation"):
        compare_runs(tuned, best_over=["max_lr"])


def test_values_that_share_no_seed_are_refused(tmp_path):
    paths = [write(tmp_path, f"{seed}", seed, 4.0, 4.0, max_lr=seed * 1e-3) for seed in (1, 2)]
    with pytest.raises(ValueError, match=r"--best_over=max_lr: no seed of learned .* "
                       r"0.001 \(seeds \[1\]\), 0.002 \(seeds \[2\]\)"):
        compare_runs(paths, best_over=["max_lr"])


def test_what_diverged_is_never_chosen(tuned, tmp_path):
    paths = [*tuned, write(tmp_path, "l0", 1, math.nan, max_lr=5e-4)]
    text = to_json(compare_runs(paths, best_over=["max_lr"]))
    learned = json.loads(text)["groups"][0]
    assert learned["choice"]["value"] == [0.002] and learned["choice"]["edge"] == ""
    assert learned["choice"]["tried"][0] == {"value": [0.0005], "seeds": [1], "loss": None,
                                             "losses": [None]}
    assert "NaN" not in text and "Infinity" not in text
    alone = [write(tmp_path, "d", 1, math.inf, max_lr=1e-3)]
    with pytest.raises(ValueError, match="learned has no finite validation loss with any of 0.001"):
        compare_runs(alone, best_over=["max_lr"])


def test_fields_that_follow_are_named_and_pairs_that_occur_are_tried(tmp_path):
    pairs = {(1e-3, 1e-4): 4.2, (2e-3, 2e-4): 4.0, (2e-3, 1e-4): 4.1}
    paths = [write(tmp_path, f"{high}-{low}", 1, loss, loss, max_lr=high, min_lr=low)
             for (high, low), loss in pairs.items()]
    with pytest.raises(ValueError, match="min_lr 0.0001 / 0.0002; name what follows from "
                       "--best_over with it, as in --best_over=max_lr,min_lr"):
        compare_runs(paths, best_over=["max_lr"])
    found = compare_runs(paths, best_over=["max_lr", "min_lr"])
    choice = found["groups"][0]["choice"]
    assert (choice["value"], choice["edge"]) == ([2e-3, 2e-4], "largest")
    assert [row["value"] for row in choice["tried"]] == [[1e-3, 1e-4], [2e-3, 1e-4], [2e-3, 2e-4]]
    said = "0.002/0.0002, the largest of 0.001/0.0001, 0.002/0.0001, 0.002/0.0002\n"
    assert said in compare.describe_runs(found, False)
    found = compare_runs(paths[1:], best_over=["max_lr", "min_lr"])  # of one max_lr
    assert "0.002/0.0002 of 0.002/0.0001, 0.002/0.0002\n" in compare.describe_runs(found, False)


def test_each_value_of_by_has_its_own_best(tmp_path):
    best = {("learned", 2): 1e-3, ("learned", 8): 2e-3, ("binary", 2): 2e-3, ("binary", 8): 1e-3}
    paths = []
    for (name, depth), chosen in best.items():
        for lr in (1e-3, 2e-3):
            paths.append(write(tmp_path, f"{name}-{depth}-{lr}", 1, 4.0 - (lr == chosen), 4.0,
                               input=name, n_layer=depth, max_lr=lr))
    groups = compare_runs(paths, by="n_layer", best_over=["max_lr"])["groups"]
    assert {(g["label"], g["by"]): g["choice"]["value"][0] for g in groups} == best


def test_a_field_of_the_input_can_be_chosen_too(tmp_path):
    """It is then no part of a name, and no difference between two inputs."""
    losses = {("learned", 0.02): 4.0, ("learned", 1.0): 3.8, ("lowdim", 0.02): 4.1,
              ("lowdim", 1.0): 4.3}
    paths = [write(tmp_path, f"{name}-{std}", 1, loss, loss, input=name, input_std=std)
             for (name, std), loss in losses.items()]
    result = compare_runs(paths, best_over=["input_std"])
    assert [(g["label"], g["choice"]["value"]) for g in result["groups"]] == [
        ("learned", [1.0]), ("lowdim", [0.02])]
    assert [(e["axis"], e["values"]) for e in result["effects"]] == [("width", [12, 192])]


@pytest.mark.parametrize("flags, words", [
    (["--best_over=max_lrr"], "did you mean max_lr"), (["--best_over=seed"], "other fields than"),
    (["--best_over=input"], "other fields than"), (["--best_over=parameters"], "expected a field"),
    (["--best_over=max_lr,max_lr"], "each once"),
    (["--best_over=max_lr", "--by=max_lr"], "that of --by")])
def test_fields_that_cannot_be_chosen_over(tuned, monkeypatch, capsys, flags, words):
    assert ends(monkeypatch, capsys, *tuned, *flags) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words in said


def test_a_field_that_one_run_lacks_is_named(tuned):
    config = json.loads((tuned[4] / "config.json").read_text())
    del config["max_lr"]
    (tuned[4] / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="--best_over=max_lr: .*l4 has no max_lr"):
        compare_runs(tuned, best_over=["max_lr"])


def test_without_the_flag_nothing_is_chosen(tuned):
    result = compare_runs([tuned[1], tuned[4].rename(tuned[4].with_name("x"))][:1])
    assert result["best_over"] == [] and result["groups"][0]["choice"] is None
    assert "best" not in compare.describe_runs(result, False)
    with pytest.raises(ValueError, match="max_lr 0.002 / 0.004"):
        compare_runs([tuned[1], tuned[6]])


def test_the_curve_of_what_was_tried_is_drawn(tuned):
    result = compare_runs(tuned, best_over=["max_lr"])
    axis = figures.make_figures(result)["lr"].axes[0]
    drawn = {line.get_label(): line for line in axis.lines if line.get_label()[0] != "_"}
    assert drawn["learned"].get_xydata().tolist() == [[1e-3, 4.0], [2e-3, 3.8], [4e-3, 3.9]]
    assert drawn["binary"].get_xydata().tolist() == [[2e-3, 4.4], [4e-3, 4.2]]
    circles = [line.get_xydata().tolist() for line in axis.lines if line.get_fillstyle() == "none"]
    assert sorted(circles) == [[[2e-3, 3.8]], [[4e-3, 4.2]]]
    assert axis.get_xscale() == "log"
    assert "lr" not in figures.make_figures(compare_runs(tuned[1:2]))
    words = compare_runs(tuned, best_over=["max_lr"]) | {"best_over": ["ffn"]}
    for group in words["groups"]:
        for row in group["choice"]["tried"]:
            row["value"] = ["gelu"]
    assert not {"lr", "best_over"} & set(figures.make_figures(words))


# --- effects of one thing

USUAL = {"vocab_size": 3072, "n_embd": 192, "code_seed": 12345, "code_offset": "0",
         "code_values": "01", "code_scale": "1", "lift": "tile", "table_free": False,
         "code_width": 0, "input_std": 0.02} | SIZES


@pytest.mark.parametrize("a, b, axes", [
    (dict(input="random"), dict(input="random", code_width=48), ["width"]),
    (dict(input="binary"), dict(input="binary", code_width=48), ["width"]),
    (dict(input="lowdim"), dict(input="learned"), ["width"]),
    (dict(input="factored", rank=12), dict(input="factored", rank=48), ["width"]),
    (dict(input="random"), dict(input="random", code_scale="0.02"), ["scale"]),
    (dict(input="random", code_scale="matched"), dict(input="random", code_scale="0.02"), []),
    (dict(input="learned"), dict(input="learned", input_std=1.0), ["scale"]),
    (dict(input="random"), dict(input="lowdim", input_std=1.0), ["learning"]),
    (dict(input="random", code_width=192), dict(input="learned", input_std=1.0), ["learning"]),
    (dict(input="random", code_width=192, code_scale="matched"), dict(input="learned"),
     ["learning"]),
    (dict(input="random", code_width=192), dict(input="learned"), ["scale", "learning"]),
    (dict(input="binary"), dict(input="binary", code_values="pm1"), ["values"]),
    (dict(input="binary", code_values="pm1"), dict(input="random"), ["values"]),
    (dict(input="random"), dict(input="sinusoid"), ["values"]),
    (dict(input="gf2"), dict(input="random"), ["values", "recoding"]),
    (dict(input="binary"), dict(input="gf2"), ["recoding"]),
    (dict(input="gf2"), dict(input="gf2", code_seed=7), ["code_seed"]),
    (dict(input="gf2"), dict(input="gf2", code_offset="2a"), ["code_offset"]),
    (dict(input="binary"), dict(input="binary", lift="interleave"), ["lift"]),
    (dict(input="lowdim"), dict(input="factored", rank=12), ["lift"]),
    (dict(input="binary", code_values="pm1"), dict(input="projected", input_std=1.0), ["lift"]),
    (dict(input="binary", code_values="pm1"), dict(input="projected"), ["lift", "scale"]),
    (dict(input="projected"), dict(input="alone"), ["lift"]),
    (dict(input="alone"), dict(input="alone", inner_width=64), ["inner_width"]),
    (dict(input="learned"), dict(input="tied"), ["table"]),
    (dict(input="lowdim"), dict(input="tied"), ["width", "table"]),
    (dict(input="digits", base=2), dict(input="digits", base=16), ["base"]),
    (dict(input="hashed"), dict(input="hashed", hashes=4), ["hashes"]),
    (dict(input="mine"), dict(input="mine", code_scale="2"), ["code_scale"]),
    (dict(input="mine"), dict(input="binary"), None),
    (dict(input="hashed"), dict(input="spelling"), None)])
def test_on_which_axes_two_inputs_differ(a, b, axes):
    a, b = labels.places(USUAL | a), labels.places(USUAL | b)
    for found in (labels.differing(a, b), labels.differing(b, a)):
        assert (found if axes is None else sorted(found)) == (axes and sorted(axes))


def test_effects_by_hand(tmp_path):
    """Paired by seed, in the order of the axis, of pairs that differ in one thing only."""
    losses = {("random", 0): (4.4, 4.5, 4.9), ("random", 192): (4.0, 4.3, 4.3),
              ("lowdim", 0): (4.2, 4.2, 4.2)}
    paths = [write(tmp_path, "learned", 1, 4.0, 4.0)]
    for (name, width), row in losses.items():
        std = 1.0 if name == "lowdim" else 0.02
        paths += [write(tmp_path, f"{name}-{width}-{seed}", seed, loss, loss, input=name,
                        code_width=width, input_std=std) for seed, loss in enumerate(row, 1)]
    effects = compare_runs(paths)["effects"]
    assert [(e["axis"], e["values"], e["from"], e["to"], e["seeds"]) for e in effects] == [
        ("learning", ["fixed", "learned"], "random code 12345", "lowdim std 1", [1, 2, 3]),
        ("width", [12, 192], "random code 12345", "random code 12345 width 192", [1, 2, 3])]
    width = effects[1]
    assert width["differences"] == pytest.approx([-0.4, -0.2, -0.6])
    assert width["difference"] == pytest.approx(-0.4)
    # s = 0.2, t(0.975, 2) = 4.302653
    assert width["seed_interval"] == pytest.approx(4.302653 * 0.2 / math.sqrt(3), rel=1e-6)
    assert width["document_interval"] == pytest.approx((-0.4, -0.4))
    assert effects[0]["difference"] == pytest.approx(-0.4)  # -0.2, -0.3, -0.7


def test_the_table_of_effects(tmp_path):
    paths = [write(tmp_path, f"learned-{depth}", 1, 4.0, 4.0 + depth, n_layer=depth)
             for depth in (2, 4)]
    paths += [write(tmp_path, f"std-{depth}", 1, 4.0, 3.75 + depth, n_layer=depth, input_std=1.0)
              for depth in (2, 4)]
    result = compare_runs(paths, by="n_layer")
    start = ["scale: 0.02 to 1 at n_layer 2", "learned", "learned std 1", "1", "-0.2500"]
    for markdown, between in ((False, " "), (True, " | ")):
        text = compare.describe_runs(result, markdown)
        rows = [" ".join(line.strip("| ").split()) for line in text.splitlines()]
        assert any(row.startswith(between.join(start)) for row in rows)
        assert sum("scale: 0.02 to 1" in row for row in rows) == 2  # not across depths
    alone = compare_runs([paths[0], write(tmp_path, "b", 1, 4.0, 4.0, input="binary",
                                                  n_layer=2)])
    assert alone["effects"] == [] and "only this changes" not in compare.describe_runs(alone, False)


# --- the figure of loss against trainable values

@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Runs of 25 interfaces with three seeds, as a large sweep leaves them."""
    folder = tmp_path_factory.mktemp("sweep") / "runs"
    values = {"learned": 589_824, "lowdim": 36_864, "projected": 2_496, "alone": 26_112,
              "hashed": 202_752, "spelling": 393_216, "digits": 9_216, "factored": 52_224}
    settings = [dict(input="learned", input_std=std) for std in (0.02, 0.2, 1.0)]
    settings += [dict(input="lowdim", input_std=std) for std in (0.02, 1.0)]
    settings += [dict(input=name) for name in ("projected", "alone", "hashed", "spelling", "tied",
                                               "binary", "gf2", "sinusoid")]
    settings += [dict(input="random", code_width=width) for width in (0, 48, 192)]
    settings += [dict(input="binary", code_values="pm1", code_width=n) for n in (0, 48, 192)]
    settings += [dict(input="digits", base=base) for base in (2, 16, 56)]
    settings += [dict(input="factored", rank=rank) for rank in (12, 16, 48)]
    paths, rng = [], np.random.default_rng(0)
    report = code_report(rng)
    for number, setting in enumerate(settings):
        n = values.get(setting["input"], 0) + number
        n = n if setting["input"] in values else 0
        level = 4 + 0.3 * rng.random()**2  # many close together
        level = 4.1 + number / 500 if setting["input"] == "digits" else level
        for seed in (1, 2, 3):
            loss = level + 0.03 * rng.random()
            paths.append(write(folder, f"{number}-{seed}", seed, loss, loss,
                               report=None if n else report, **USUAL | setting,
                               parameters={"input": n, "body": 1, "head": 1, "trainable": n + 2}))
    return paths


def test_every_mark_is_where_it_belongs(tmp_path):
    counts = {"learned": (589_824, (4.0, 4.2)), "learned std 1": (589_824, (3.7, 3.9)),
              "lowdim": (36_864, (4.3, 4.5)), "binary": (0, (4.6, 4.6)), "gf2": (0, (4.6, 4.8))}
    paths = []
    for name, (n, losses) in counts.items():
        for seed, loss in enumerate(losses, 1):
            paths.append(write(tmp_path, f"{name}{seed}", seed, loss, loss, input=name.split()[0],
                               input_std=1.0 if "std" in name else 0.02, parameters={"input": n}))
    figure = figures.make_figures(compare_runs(paths))["pareto"]
    zero, right = figure.axes
    assert [tick.get_text() for tick in zero.get_xticklabels()] == ["0"]
    assert right.get_xscale() == "log" and zero.get_ylim() == right.get_ylim()
    marks = {}
    for axis in (zero, right):
        for line in axis.lines:
            if line.get_marker() in ("o", "_"):
                marks.setdefault((axis, line.get_marker()), []).append(line.get_xydata())
        across = [line for line in axis.lines if list(line.get_xdata()) == [0, 1]]
        assert [list(line.get_ydata()) for line in across] == [[3.8, 3.8]]  # the best table
    dots = sorted(np.concatenate(marks[right, "o"]).tolist())
    assert dots == [[36_864, pytest.approx(4.4)], [589_824, pytest.approx(3.8)],
                    [589_824, pytest.approx(4.1)]]
    assert sorted(np.concatenate(marks[zero, "o"])[:, 1]) == pytest.approx([4.6, 4.7])
    ticks = sorted(np.concatenate(marks[right, "_"])[:, 1])
    assert ticks == pytest.approx([3.7, 3.9, 4.0, 4.2, 4.3, 4.5])
    steps = next(line for line in right.lines if len(line.get_xdata()) == 6)
    assert steps.get_ydata() == pytest.approx([4.6, 4.6, 4.4, 4.4, 3.8, 3.8])
    assert steps.get_xdata()[1:5].tolist() == [36_864, 36_864, 589_824, 589_824]
    names = {text.get_text() for axis in figure.axes for text in axis.texts}
    assert names == {"learned", "learned std 1", "lowdim", "binary", "gf2"}


def test_no_name_covers_another_or_leaves_the_page(many):
    result = compare_runs(many, resamples=100)
    with figures.import_matplotlib().rc_context(figures.STYLE):
        figure = figures.make_figures(result)["pareto"]
        figure.draw_without_rendering()
    boxes = [text.get_window_extent() for axis in figure.axes for text in axis.texts]
    assert len(boxes) == len(result["groups"]) == 25
    for box in boxes:
        assert 0 <= box.x0 and box.x1 <= 830 and 0 <= box.y0 and box.y1 <= figure.bbox.height
    for a, b in itertools.combinations(boxes, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width <= 0.5 or height <= 0.5, (a, b)


def test_it_is_drawn_of_one_experiment_whose_values_are_known(tmp_path):
    paths = [write(tmp_path, f"{name}-{n}", 1, 4.0, 4.0, input=name, n_layer=n,
                   parameters={"input": 0 if name == "binary" else 9})
             for name in ("learned", "binary") for n in (2, 4)]
    assert "pareto" not in figures.make_figures(compare_runs(paths, by="n_layer"))
    assert "pareto" in figures.make_figures(compare_runs(paths[::2]))
    edit(paths[0] / "config.json", parameters=None)
    assert "pareto" not in figures.make_figures(compare_runs(paths[::2]))


# --- runs in a file

def everything(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines_of(paths, file):
    """Write the runs of directories to a file, as compare.py does; return it."""
    write_runs(read_runs(paths), file)
    return file


def refused(monkeypatch, capsys, *arguments):
    """Return the one line with which compare.py ends."""
    assert ends(monkeypatch, capsys, *arguments) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_from_the_file_alone_all_is_the_same(tmp_path, monkeypatch, capsys):
    report = code_report(np.random.default_rng(0))
    paths = [write_run(tmp_path / "runs", f"{name}-{seed}-{lr}", seed, lr * 100 + 0.1 * len(name),
                       eval_windows=64, report=report if name == "binary" else None, input=name,
                       max_lr=lr)
             for name, lr in (("learned", 1e-3), ("learned", 2e-3), ("binary", 2e-3))
             for seed in (1, 2)]
    (paths[2] / "heldout-00000010.json").unlink()  # of a learning rate that is not chosen
    (paths[3] / "heldout-00000010.json").unlink()
    log = paths[4] / "log.jsonl"
    rows = log.read_text().splitlines()
    rows[2] = json.dumps(json.loads(rows[2]) | {"val_loss": math.nan})  # in JSON it is null
    log.write_text("\n".join(rows) + "\n")
    flags = ["--best_over=max_lr", "--resamples=500"]
    first = text_of(monkeypatch, capsys, *paths, *flags, f"--out={tmp_path}/first")
    file = (tmp_path / "runs").rename(tmp_path / "gone").with_name("kept.jsonl")
    file.write_bytes((tmp_path / "first/runs.jsonl").read_bytes())
    assert text_of(monkeypatch, capsys, file, *flags, f"--out={tmp_path}/again") == first
    assert everything(tmp_path / "again") == everything(tmp_path / "first")
    assert {"pareto.png", "lr.png", "codes.png", "gap.png"} <= set(everything(tmp_path / "again"))
    text = file.read_text()
    assert text.count("\n") == 6 and str(tmp_path) not in text and "data/x" not in text
    assert max(map(len, text.splitlines())) < 6000


def test_a_line_holds_what_its_run_left(tmp_path):
    path = write(tmp_path, "l1", 3, 4.0000004, 4.25, vocab_size=3072)
    edit(path / "heldout-00000010.json", dtype="bfloat16", max_length=64, data_sha256="f" * 64,
         weights_sha256="ab" * 32, documents=[{"targets": 9, "bytes": 20, "nats": 38.25049}])
    run = json.loads(lines_of([path], tmp_path / "x.jsonl").read_text())
    assert (run["run"], run["config"]["seed"], run["trained"]) == ("l1", 3, 40_960)
    assert run["curve"][-1] == [40_960, 4.0] and len(run["curve"]) == 11
    assert run["targets_per_second"] == 9004.5
    assert run["heldout"] == {
        "step": 10, "dtype": "bfloat16", "max_length": 64, "data_sha256": "f" * 64,
        "weights_sha256": "ab" * 32, "loss": 4.25, "bits_per_byte": 1.5, "documents": [[9, 38.25]]}


def test_files_and_directories_mix_and_each_run_counts_once(tuned, tmp_path):
    whole = compare_runs(tuned, best_over=["max_lr"])
    a, b = lines_of(tuned[:3], tmp_path / "a.jsonl"), lines_of(tuned[2:5], tmp_path / "b.jsonl")
    copy = tuned[4].rename(tmp_path / "another_name")
    assert compare_runs([a, b, copy, *tuned[5:]], best_over=["max_lr"]) == whole
    assert len(read_runs([a, b, copy, *tuned[5:]])) == len(tuned)


def test_of_a_run_given_twice_the_one_with_a_score_counts(tuned, tmp_path):
    """Its line may be older than the score."""
    score = (tuned[1] / "heldout-00000010.json").rename(tmp_path / "later")
    file = lines_of(tuned, tmp_path / "a.jsonl")
    score.rename(tuned[1] / "heldout-00000010.json")
    for given in ([file, tuned[1]], [tuned[1], file]):
        assert compare_runs(given, best_over=["max_lr"])["groups"][0]["losses"] == [3.9, 4.1, 4.3]


def test_two_runs_of_one_seed_are_refused(tuned, tmp_path, monkeypatch, capsys):
    file = lines_of(tuned, tmp_path / "a.jsonl")
    edit(tuned[1] / "heldout-00000010.json", loss=3.91)
    said = refused(monkeypatch, capsys, file, tuned[1], "--best_over=max_lr")
    assert f"{file}, line 2 and {tuned[1]} are one run with two different held-out scores" in said
    log = tuned[0] / "log.jsonl"
    log.write_text(log.read_text().replace('"val_loss": 4.0,', '"val_loss": 4.01,'))
    said = refused(monkeypatch, capsys, file, tuned[0], "--best_over=max_lr")
    assert f"{file}, line 1 and {tuned[0]} are both learned of seed 1; leave one out" in said


def test_a_chosen_line_without_a_score_says_what_to_type(tuned, tmp_path, monkeypatch, capsys):
    (tuned[3] / "heldout-00000010.json").unlink()
    file = lines_of(tuned, tmp_path / "a.jsonl")
    said = refused(monkeypatch, capsys, file, "--best_over=max_lr")
    assert said.rstrip().endswith("type python evaluate.py score l2-s3 where these directories "
                                  "are, and give them too")


@pytest.mark.parametrize("line", [
    b"", b"{", b"3", b"null", b"[1]", b'{"a": 1}', b'{"step": 0, "targets": 0, "val_loss": 5.6}',
    b'{"run": "\xe9"}', b"<<<<<<< HEAD",
    b'{"run":"x","config":{},"curve":[],"trained":1,"targets_per_second":1,"heldout":null}',
    b'{"run":3,"config":3,"curve":3,"trained":"x","targets_per_second":[],"heldout":3}'])
def test_a_damaged_line_is_named(tuned, tmp_path, monkeypatch, capsys, line):
    file = lines_of(tuned, tmp_path / "a.jsonl")
    rows = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*rows[:2], line, *rows[3:]]))
    said = refused(monkeypatch, capsys, file, "--best_over=max_lr", f"--out={tmp_path}/none")
    assert f"{file}, line 3: " in said and "; expected " in said
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("key, value", [
    ("curve", "x"), ("curve", [[1, 2, 3]]), ("curve", [["a", 1]]), ("trained", "x"),
    ("heldout", {"documents": 3}), ("heldout", 3), ("heldout", {"step": "x"}), ("config", [])])
def test_a_line_with_a_wrong_value_is_named(tuned, tmp_path, monkeypatch, capsys, key, value):
    file = lines_of(tuned, tmp_path / "a.jsonl")
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    rows[1][key] = value
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused(monkeypatch, capsys, file, "--best_over=max_lr", f"--out={tmp_path}/none")
    assert f"{file}, line 2: " in said


@pytest.mark.parametrize("name, words", [
    ("comparison.json", "give the runs.jsonl of its runs"), ("empty.jsonl", "no run in it"),
    ("gone.jsonl", "gone.jsonl: No such file")])
def test_other_files_are_told(tmp_path, monkeypatch, capsys, name, words):
    if name != "gone.jsonl":
        (tmp_path / name).write_text("")
    assert words in refused(monkeypatch, capsys, tmp_path / name, f"--out={tmp_path}/none")


def test_the_file_may_be_written_over_by_more_runs(tuned, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "draw_runs", lambda result, out: [])
    file = lines_of(tuned[:-1], tmp_path / "runs.jsonl")
    text_of(monkeypatch, capsys, file, tuned[-1], "--best_over=max_lr", f"--out={tmp_path}")
    assert [run["run"] for run in read_runs([file])] == [path.name for path in tuned]


# --- what is missing

@pytest.mark.parametrize("package", ["scipy", "matplotlib"])
def test_a_package_that_is_not_installed_is_one_line(tmp_path, tuned, package):
    (tmp_path / "path" / package).mkdir(parents=True)
    code = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    (tmp_path / "path" / package / "__init__.py").write_text(code)
    command = [sys.executable, ROOT / "compare.py", *tuned, "--best_over=max_lr",
               f"--out={tmp_path}/c"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path,
                          env={"PATH": "", "PYTHONPATH": str(tmp_path / "path")})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"No module named '{package}'" in done.stderr and "pip install" in done.stderr
