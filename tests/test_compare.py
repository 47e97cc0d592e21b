"""compare.py: statistics against scipy and closed forms, fingerprints, tables."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import compare
from machinery import statistics
from machinery.errors import one_line

stats = pytest.importorskip("scipy.stats")
ROOT = Path(__file__).parents[1]


def scores(name="a", seed=0, n=200, p=0.6, **protocol):
    """Return a scores file's values: a task of accuracies, a page task, a group of two tasks."""
    r = np.random.default_rng(seed)

    def choice(task, n):
        acc = (r.random(n) < p).astype(float).tolist()
        docs = {"doc_id": list(range(n)), "responses": [[[-1.0, False]]] * n,
                "loglikelihood": r.normal(-5, 1, n).tolist(), "acc": acc}
        return {"metrics": {"alias": task, "acc": float(np.mean(acc)), "acc_stderr": 0.0123},
                "version": 1, "num_fewshot": 0, "n_docs": n, "n_requests": 4 * n, "n_truncated": 0,
                "prompts_sha256": task, "tokens_sha256": task, "docs": docs}

    page = choice("page", 12)
    sizes = r.integers(50, 500, 12)
    nats = (-sizes * r.normal(0.7, 0.05, 12)).tolist()
    page["metrics"] = {"bits_per_byte": -sum(nats) / math.log(2) / sum(sizes.tolist()),
                       "bits_per_byte_stderr": "N/A"}
    page["docs"] = {"doc_id": list(range(12)), "responses": nats, "loglikelihood": nats,
                    "bits_per_byte": list(zip(nats, sizes.tolist()))}
    return {"model": {"name": f"out/{name}", "step": 1},
            "protocol": {"dtype": "float32", "max_length": 2048, "lm_eval": "0.4.13"} | protocol,
            "tasks": {"piqa": choice("piqa", n), "wikitext": page, "mmlu_x": choice("mmlu_x", 40),
                      "mmlu_y": choice("mmlu_y", 60)},
            "groups": {"mmlu": {"metrics": {"acc": 0.3}, "tasks": ["mmlu_x", "mmlu_y"]}}}


@pytest.fixture
def write(tmp_path):
    def write(name, values):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(values))
        return str(path)
    return write


def output(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    compare.main()
    return capsys.readouterr().out


def ends(monkeypatch, capsys, *arguments):
    """Run the command in this process, print what its end prints, return its exit code."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    try:
        with one_line("compare.py", ""):
            compare.main()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return 1 if isinstance(error.code, str) else error.code
    return 0


@pytest.mark.parametrize("b, c", [
    (0, 0), (0, 1), (1, 0), (3, 3), (2, 9), (40, 70), (700, 590), (3000, 3001)])
def test_mcnemar_equals_the_exact_binomial_test(b, c):
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert statistics.mcnemar(b, c) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_closed_forms():
    assert statistics.mcnemar(0, 5) == 2 / 2**5
    assert statistics.mcnemar(1, 5) == 2 * (1 + 6) / 2**6
    assert statistics.mcnemar(4, 4) == 1.0


def test_holm_by_hand_and_against_scipy_s_neighbour():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0]
    assert statistics.holm([0.9]) == [0.9] and statistics.holm([]) == []
    p = np.random.default_rng(0).random(9) ** 3
    corrected = np.array(statistics.holm(p))
    # Step-down: hypothesis i is rejected at level a if and only if all smaller ones are, each at
    # a / (number left).
    for level in (0.01, 0.05, 0.2, 0.5):
        order, rejected = np.argsort(p), np.zeros(9, bool)
        for left, place in zip(range(9, 0, -1), order):
            if p[place] > level / left:
                break
            rejected[place] = True
        assert (rejected == (corrected <= level)).all()


def test_of_many_documents_the_interval_is_the_bootstraps():
    r = np.random.default_rng(1)
    difference = r.normal(0.3, 2, 150)
    low, high, p, _ = statistics.paired_subsets(difference, np.ones(150), 20_000)
    theirs = stats.bootstrap((difference,), np.mean, n_resamples=20_000, method="percentile",
                             random_state=0).confidence_interval
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.02)
    # Closed form: a subset's mean is about normal around the mean, with the standard error of the
    # population.
    error = difference.std() / math.sqrt(150)
    assert p == pytest.approx(2 * stats.norm.sf(abs(difference.mean()) / error), rel=0.15)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.04)


def test_interval_of_a_ratio():
    r = np.random.default_rng(2)
    weight = r.integers(50, 500, 80).astype(float)
    difference = weight * r.normal(0.1, 0.3, 80)
    low, high, _, _ = statistics.paired_subsets(difference, weight, 20_000)
    ratio = difference.sum() / weight.sum()
    error = math.sqrt(((difference - ratio * weight) ** 2).sum()) / weight.sum()  # delta method
    assert (low + high) / 2 == pytest.approx(ratio, abs=0.1 * error)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.05)


@pytest.mark.parametrize("kind", ("accuracy", "loglikelihood"))
def test_interval_covers_nearly_as_often_as_it_says(kind):
    """Of 400 synthetic pairs of models, about 95 % of the intervals hold the true difference."""
    r, covered = np.random.default_rng(3), 0
    for i in range(400):
        if kind == "accuracy":
            difference, true = r.choice([-1.0, 0.0, 1.0], 200, p=[0.1, 0.75, 0.15]), 0.05
        else:
            difference, true = r.standard_t(5, 200) + 0.2, 0.2
        low, high, _, _ = statistics.paired_subsets(difference, np.ones(200), 500, seed=i)
        covered += low <= true <= high
    assert 0.91 <= covered / 400 <= 0.98


def test_p_values_are_uniform_where_there_is_no_difference():
    r = np.random.default_rng(4)
    p = np.array([statistics.paired_subsets(r.normal(0, 1, 100), np.ones(100), 400, seed=i)[2]
                  for i in range(300)])
    assert 0.02 < (p < 0.05).mean() < 0.09 and 0.4 < p.mean() < 0.6


@pytest.mark.parametrize("draw", ["normal", "heavy tails", "pages of unlike length"])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 44])
def test_few_documents_give_no_false_alarm(n, draw):
    """Where there is no difference p is at or below 5 % in 5 % of cases, and intervals hold 0."""
    r, alarms, covered, trials = np.random.default_rng(n), 0, 0, 1000
    for i in range(trials):
        weight = r.integers(50, 5000, n).astype(float) if draw[0] == "p" else np.ones(n)
        difference = weight * (r.standard_t(2, n) if draw[0] == "h" else r.normal(0, 1, n))
        low, high, p, least = statistics.paired_subsets(difference, weight, 300, seed=i)
        alarms += p <= 0.05
        covered += low is None or low <= 0 <= high
        assert p >= least and (low is None) == (n < 6)
        assert low is None or (p <= 0.05) == (not low <= 0 <= high)
    assert alarms <= 0.05 * trials + 2.6 * math.sqrt(0.05 * 0.95 * trials)
    assert covered >= 0.95 * trials - 2.6 * math.sqrt(0.05 * 0.95 * trials)
    if n in (1, 2, 5):
        assert alarms == 0  # the least possible p is 1, 0.5, 0.0625


@pytest.mark.parametrize("n", [1, 2, 5, 8, 12])
def test_few_documents_get_the_exact_sign_flip_test(n):
    difference = np.random.default_rng(n).normal(0.5, 1, n)
    _, _, p, least = statistics.paired_subsets(difference, np.ones(n), 10_000)
    theirs = stats.permutation_test((difference,), np.mean, permutation_type="samples",
                                    n_resamples=np.inf) if n > 1 else None
    assert p == pytest.approx(1.0 if n == 1 else theirs.pvalue)
    assert least == 2.0 ** (1 - n)
    assert statistics.paired_subsets(np.abs(difference), np.ones(n), 10_000)[2] == least


def test_of_two_documents_nothing_is_significant():
    low, high, p, least = statistics.paired_subsets(np.array([0.5, 1.5]), np.ones(2), 10_000)
    assert (low, high, p, least) == (None, None, 0.5, 0.5)


@pytest.mark.parametrize("n", [2, 8])
def test_few_documents_are_said_to_be_few(write, monkeypatch, capsys, n):
    files = write("a", scores(n=n)), write("b", scores("b", seed=1, n=n))
    text = output(monkeypatch, capsys, *files)
    row = next(line for line in text.splitlines() if "loglikelihood" in line and "piqa" in line)
    assert ("too few documents" in row) == (n == 2)
    assert f"(least possible {2.0 ** (1 - n):.2g})" in row
    mmlu = next(line for line in text.splitlines() if "loglikelihood" in line and "mmlu" in line)
    assert "too few" not in mmlu and "least" not in mmlu


def test_a_model_against_itself(write, monkeypatch, capsys):
    a, again = write("a", scores()), write("again", scores())
    found = json.loads(output(monkeypatch, capsys, a, again, "--format=json"))
    tests = found["pairs"][0]["tests"]
    assert {(t["task"], t["metric"]) for t in tests} == {
        ("piqa", "acc"), ("piqa", "loglikelihood"), ("wikitext", "bits_per_byte"),
        ("mmlu", "acc"), ("mmlu", "loglikelihood")}
    for t in tests:
        assert t["difference"] == t["low"] == t["high"] == 0 and t["p"] == t["p_holm"] == 1


def test_pairs_are_the_same_documents(write, monkeypatch, capsys):
    """Their order in a file does not matter; a group's documents are all its tasks'."""
    first, other = scores(seed=1, p=0.5), scores("b", seed=2, p=0.8)
    shuffled = json.loads(json.dumps(other))
    for task in shuffled["tasks"].values():
        for values in task["docs"].values():
            values.reverse()

    def tests_of(values):
        paths = write("a", first), write("b", values)
        result = json.loads(output(monkeypatch, capsys, *paths, "--format=json"))
        return {(t["task"], t["metric"]): t for t in result["pairs"][0]["tests"]}

    tests, again = tests_of(other), tests_of(shuffled)
    for key, t in tests.items():
        assert t["difference"] == pytest.approx(again[key]["difference"])
        assert t.get("only_first") == again[key].get("only_first")
    piqa = tests["piqa", "acc"]
    a = np.array(first["tasks"]["piqa"]["docs"]["acc"])
    b = np.array(other["tasks"]["piqa"]["docs"]["acc"])
    assert piqa["difference"] == pytest.approx(b.mean() - a.mean())
    only_first, only_other = ((a == 1) & (b == 0)).sum(), ((a == 0) & (b == 1)).sum()
    assert (piqa["only_first"], piqa["only_other"]) == (only_first, only_other)
    expected = stats.binomtest(int(only_first), int(only_first + only_other)).pvalue
    assert piqa["p"] == pytest.approx(expected)
    assert tests["mmlu", "acc"]["n"] == 100
    page = tests["wikitext", "bits_per_byte"]
    assert page["first"] == pytest.approx(first["tasks"]["wikitext"]["metrics"]["bits_per_byte"])


def test_other_prompts_are_refused(write, monkeypatch):
    other = scores("b")
    other["tasks"]["mmlu_y"]["prompts_sha256"] = "other"
    monkeypatch.setattr(sys, "argv", ["compare.py", write("a", scores()), write("b", other)])
    with pytest.raises(ValueError, match="did not see the same documents and prompts in mmlu_y"):
        compare.main()


def test_other_differences_are_marked(write, monkeypatch, capsys):
    other = scores("b", dtype="bfloat16", max_length=1024)
    other["tasks"]["piqa"] |= {"tokens_sha256": "other", "n_truncated": 3}
    out = output(monkeypatch, capsys, write("a", scores()), write("b", other))
    for said in ("NOTE:", "dtype: float32 there, bfloat16 here",
                 "max_length: 2048 there, 1024 here", "other token ids in 1 of 4 tasks",
                 "other numbers of truncated requests in 1 of 4"):
        assert said in out
    alike = write("a", scores()), write("c", scores("c", seed=5))
    assert "NOTE" not in output(monkeypatch, capsys, *alike)


def test_accuracies_that_are_shares_are_points_too(write, monkeypatch, capsys):
    """As truthfulqa_mc2's, whose documents are right in part: no McNemar test, but percent."""
    files = [scores("a"), scores("b", seed=1)]
    for file in files:
        docs = file["tasks"]["piqa"]["docs"]
        docs["acc"] = [value * 0.7 for value in docs["acc"]]
    text = output(monkeypatch, capsys, write("a", files[0]), write("b", files[1]))
    row = next(line for line in text.splitlines()
               if line.startswith("piqa") and "sign flips" in line and "  acc  " in line)
    first, other = (np.mean(file["tasks"]["piqa"]["docs"]["acc"]) for file in files)
    assert f"{100 * (other - first):+.3f} points" in row


def test_tables(write, monkeypatch, capsys):
    a, b = write("a", scores()), write("b", scores("b", seed=1, p=0.9))
    text = output(monkeypatch, capsys, a, b, "--published=binary,gf2")
    lines = text.splitlines()
    piqa = next(line for line in lines if line.startswith("piqa") and "acc, %" in line)
    assert "±1.23" in piqa and piqa.split()[-2:] == ["70.51", "71.16"]
    assert "paper: binary" in lines[0] and "paper: gf2" in lines[0] and "mmlu_x" not in text
    for said in ("exact McNemar", "p (Holm)", "points", "bits/byte"):
        assert said in text
    markdown = output(monkeypatch, capsys, a, b, "--format=markdown")
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert table[1].startswith("| --- | --- | ---:")
    assert len({line.count("|") for line in table[:4]}) == 1
    single = output(monkeypatch, capsys, a)
    assert "McNemar" not in single and "piqa" in single
    assert "paper" not in single


def strict(text):
    """Parse JSON as other languages do: without NaN."""
    def refuse(word):
        raise AssertionError(word)
    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("metric, task, bad", [
    ("loglikelihood", "piqa", math.nan), ("loglikelihood", "piqa", -math.inf),
    ("acc", "piqa", math.nan), ("acc", "piqa", None), ("acc", "mmlu_x", math.nan),
    ("bits_per_byte", "wikitext", math.nan), ("bits_per_byte", "wikitext", -math.inf),
    ("bits_per_byte", "wikitext", None)])  # None: as JSON has what is not finite
def test_a_score_that_is_not_finite_gives_no_p_value(write, monkeypatch, capsys, metric, task, bad):
    first, other = scores(), scores("b", seed=1)
    files = write("a", first), write("b", other)
    good = strict(output(monkeypatch, capsys, *files, "--format=json"))
    values = other["tasks"][task]["docs"][metric]
    values[3] = (bad, 100) if metric == "bits_per_byte" else bad
    files = write("a", first), write("b", other)
    found = strict(output(monkeypatch, capsys, *files, "--format=json"))
    row = "mmlu" if task == "mmlu_x" else task
    for t, before in zip(found["pairs"][0]["tests"], good["pairs"][0]["tests"]):
        if (t["task"], t["metric"]) != (row, metric):
            assert {**t, "p_holm": 0} == {**before, "p_holm": 0}
            continue
        assert t["test"] == "not finite" and t["n"] == before["n"]
        for key in ("difference", "low", "high", "p", "p_holm"):
            assert t[key] is None
    text = output(monkeypatch, capsys, *files)
    assert f"NOTE: b: {metric} of {row} is not finite in 1 of" in text
    assert "nan" not in text and "inf" not in text


def test_documents_without_a_right_answer_are_left_out(write, monkeypatch, capsys):
    files = [scores(), scores("b", seed=1)]
    for file in files:
        file["tasks"]["piqa"]["docs"]["loglikelihood"][7] = None
    found = strict(output(monkeypatch, capsys, write("a", files[0]), write("b", files[1]),
                          "--format=json"))
    tests = {(t["task"], t["metric"]): t for t in found["pairs"][0]["tests"]}
    assert tests["piqa", "loglikelihood"]["n"] == 199 and tests["piqa", "acc"]["n"] == 200
    assert tests["piqa", "loglikelihood"]["p"] is not None


def test_a_metric_that_is_not_finite_is_marked(write, monkeypatch, capsys):
    shown = scores()
    shown["tasks"]["piqa"]["metrics"]["acc"] = math.nan
    shown["tasks"]["wikitext"]["metrics"] |= {"bits_per_byte": math.inf, "word_perplexity": None}
    text = output(monkeypatch, capsys, write("a", shown))
    assert text.count("not finite") == 3 and "nan" not in text


def test_an_extreme_score_loses_nothing_else(write, monkeypatch, capsys):
    """One document at -1e300 nats: no warning, and one document is not significant."""
    first, other = scores(), scores("b", seed=1)
    other["tasks"]["piqa"]["docs"]["loglikelihood"][3] = -1e300
    with np.errstate(all="raise"):
        files = write("a", first), write("b", other)
        found = strict(output(monkeypatch, capsys, *files, "--format=json"))
        assert "piqa" in output(monkeypatch, capsys, *files)
    tests = {(t["task"], t["metric"]): t for t in found["pairs"][0]["tests"]}
    assert tests["piqa", "loglikelihood"]["p"] > 0.9 and len(tests) == 5


def test_pages_without_bytes_give_no_ratio(write, monkeypatch, capsys):
    files = [scores(), scores("b", seed=1)]
    for file in files:
        docs = file["tasks"]["wikitext"]["docs"]
        docs["bits_per_byte"] = [(nats, 0) for nats, _ in docs["bits_per_byte"]]
    found = strict(output(monkeypatch, capsys, write("a", files[0]), write("b", files[1]),
                          "--format=json"))
    page = next(t for t in found["pairs"][0]["tests"] if t["task"] == "wikitext")
    assert page["test"] == "not finite" and page["p"] is None


@pytest.mark.parametrize("change", [
    {"tasks": {}}, {"tasks": {"piqa": {}}}, {"tasks": 3}, {"groups": {"g": {}}}, {"model": "x"},
    {"protocol": {}}, {"groups": {"g": {"tasks": ["absent"], "metrics": {}}}}])
def test_every_damage_to_scores_ends_in_one_line_that_names_it(write, monkeypatch, capsys, change):
    bad = write("bad", scores() | change)
    for paths in ([bad], [write("a", scores()), bad]):
        assert ends(monkeypatch, capsys, *paths) == 1
        words = capsys.readouterr().err
        assert bad in words and words.count("\n") == 1


@pytest.mark.parametrize("bad, code, said", [
    (["no.json"], 1, "no.json"), (["."], 1, "config.json"),
    (["a.json", "folder"], 2, "folder does not"), (["folder", "a.json"], 2, "folder does not")])
def test_paths_that_cannot_be_compared(tmp_path, write, monkeypatch, capsys, bad, code, said):
    write("a", scores())
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ends(monkeypatch, capsys, *bad) == code
    words = capsys.readouterr().err
    assert said in words and words.count("\n") == 1


def test_a_reader_that_stops_reading_gets_no_complaint(write):
    command = f"{sys.executable} compare.py {write('a', scores())} | true"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


def test_limited_scores_are_marked(write, monkeypatch, capsys):
    """A part of a benchmark is not the benchmark, least of all beside the paper's figures."""
    limited = write("a", scores(limit=50))
    text = output(monkeypatch, capsys, limited, write("b", scores("b")), "--published=binary")
    assert "a (first 50 documents)" in text.splitlines()[0] and "b (first" not in text
    note = next(line for line in text.splitlines() if line.startswith("NOTE"))
    assert "a: the first 50 documents of each task" in note and "all of them" in note
    assert "(first 50 documents)" in output(monkeypatch, capsys, limited)
    assert "NOTE" not in output(monkeypatch, capsys, limited)


def test_other_shots_than_the_papers_are_marked(write, monkeypatch, capsys):
    shown = scores()
    shown["tasks"]["piqa"]["num_fewshot"] = 3
    text = output(monkeypatch, capsys, write("a", shown), "--published=binary")
    assert "NOTE: a: 3-shot in piqa" in text
    shown["tasks"]["piqa"]["num_fewshot"] = 0
    assert "NOTE" not in output(monkeypatch, capsys, write("a", shown), "--published=binary")


@pytest.mark.parametrize("content, said", [
    ("{", "not JSON"), ("[]", "not a scores file"), ('{"loss": 1}', "not a scores file")])
def test_other_files_are_refused(tmp_path, monkeypatch, content, said):
    (tmp_path / "x.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "x.json")])
    with pytest.raises(ValueError, match=said):
        compare.main()


@pytest.mark.parametrize("arguments, said", [
    (["a.json", "--published=nobody"], "expected some of binary"),
    (["a.json", "--resamples=5"], "expected 100 or more"),
    (["a.json", "--format=xml"], "invalid choice"),
    ([], "required")])
def test_wrong_flags(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit) as error:
        compare.main()
    assert error.value.code == 2 and said in capsys.readouterr().err
