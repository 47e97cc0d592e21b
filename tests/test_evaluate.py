"""evaluate.py: scoring against direct computation and the harness's own backend, the audit, export and import, sampling."""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

os.environ["HF_HUB_OFFLINE"] = "1"

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import evaluate
from machinery import harness, huggingface, scorer
from machinery.checkpoints import load_model
from machinery.harness import HarnessLM
from machinery.scorer import Candidate
from machinery.tokenizer import UTF16_JSON, load_tokenizer, train_tokenizer
from model import Decoder, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not (SHARED / "eval" / "data").is_dir(), reason="../shared/eval/data is not there")
TEXTS = ["The quick brown fox jumps over the lazy dog. ", "def main():\n    return 42\n", "naïve café, plain cafe; question and answer: A B C D. "]
T = 64


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS * 20, 320).to_str())
    return path


@pytest.fixture(scope="session")
def make_run(tokenizer_file, tmp_path_factory):
    """Return a function that writes a run directory with a random model, and returns it; one for each set of arguments."""
    made = {}

    def make(input="binary", step=7, **sizes):
        key = (input, step, *sorted(sizes.items()))
        if key not in made:
            config = ModelConfig(**{"input": input, "vocab_size": 512, "block_size": T, "n_layer": 2, "n_head": 2, "n_embd": 36, "n_ffn": 48} | sizes)
            model = Decoder(config)
            with torch.no_grad():  # larger than at the start of training, so that a wrong position or mask shows
                for p in model.parameters():
                    p.mul_(6 if p.dim() == 2 else 1)
            made[key] = tmp_path_factory.mktemp("run")
            (made[key] / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
            torch.save({"step": step, "model": model.state_dict(), "model_config": dataclasses.asdict(config), "data": "", "eot_id": 0,
                        "tokenizer_sha256": ""}, made[key] / f"step-{step:08d}.pt")
        return made[key]

    return make


@pytest.fixture(scope="session")
def binary(make_run):
    return evaluate.open_checkpoint(make_run("binary"), "cpu", "float32")


def stub(forward, encode=lambda texts, special: [[ord(c) for c in text] for text in texts], context=2048, **facts):
    return Candidate(forward, list, encode, lambda ids: "".join(map(chr, ids)), None, 0, "", 256, context,
                     {"name": "stub", "step": None, "weights_sha256": "w", "tokenizer_sha256": "t"} | facts)


def uniform(idx, select=None, **_):
    return torch.zeros(len(select[0]), 256)


def request(*args, task="task", doc_id=0, idx=0, kind="loglikelihood"):
    return Instance(kind, {}, args, idx, (task, doc_id, 1))


def direct(candidate, context, continuation, T=T):
    """Score one request by itself, by the definition."""
    ids = list(context) + list(continuation)
    row = torch.tensor([ids[-(T + 1):][:-1]])
    n = len(continuation)
    at = torch.arange(row.size(1) - n, row.size(1))
    logits = candidate.forward(row, select=(torch.zeros_like(at), at)).float()
    logp = F.log_softmax(logits, -1)
    targets = torch.tensor(list(continuation))
    return logp[torch.arange(n), targets].sum().item(), bool((logits.argmax(-1) == targets).all())


def arrays(pairs):
    return [(np.array(a, np.int32), np.array(b, np.int32)) for a, b in pairs]


def assert_close(got, expected, tolerance=1e-4):
    assert len(got) == len(expected)
    for (a, greedy_a), (b, greedy_b) in zip(got, expected):
        assert a == pytest.approx(b, abs=tolerance) and greedy_a == greedy_b


def random_pairs(seed=0):
    """Questions with shared contexts, one-token answers, shared examples, twins cut at two places, duplicates, over-long ones."""
    r = np.random.default_rng(seed)
    ids = lambda n: r.integers(0, 320, n).tolist()  # noqa: E731
    pairs = []
    for _ in range(6):
        context = ids(r.integers(5, 25))
        pairs += [(context, ids(n)) for n in (1, 1, 1, 3, 8)]
    examples = ids(20)
    for _ in range(5):
        question = examples + ids(r.integers(3, 12))
        pairs += [(question, ids(1)) for _ in range(4)]
    twin = ids(30)
    pairs += [(twin[:10], twin[10:]), (twin[:20], twin[20:]), (twin[:29], twin[29:]), (twin[:29], [5])]
    pairs += [(ids(60), ids(n)) for n in (4, 5, 6, 20)] + [(ids(200), ids(5)), (ids(1), ids(T))]
    return arrays(pairs + pairs[:3])


# ---------------------------------------------------------------------------------------------- scoring

def test_scores_equal_direct_computation(binary):
    pairs = random_pairs()
    expected = [direct(binary, a.tolist(), b.tolist()) for a, b in pairs]
    assert_close(HarnessLM(binary, share=False).score(pairs), expected)
    assert_close(HarnessLM(binary).score(pairs), expected)
    assert len({greedy for _, greedy in expected}) == 1  # random models are never right: the next test has a model that is


def test_greedy_flag_and_shift():
    """A model sure of the next id of 0 1 2 3 ...: its continuation scores 0 and is greedy (EV-12)."""
    def forward(idx, select=None, **_):
        return F.one_hot((idx[select] + 1) % 256, 256).float() * 1000
    lm = HarnessLM(stub(forward), share=False)
    (right, yes), (wrong, no), (late, partly) = lm.score(arrays([(range(5, 9), range(9, 14)), (range(5, 9), [9, 11]), ([1], [2, 3, 3])]))
    assert (right, yes) == (0.0, True) and wrong < -900 and late < -900 and not no and not partly


def test_of_equal_logits_the_first_is_the_greedy_one():
    """As the harness's argmax has it; in bfloat16 equal logits are common."""
    assert [greedy for _, greedy in HarnessLM(stub(uniform)).score(arrays([([1], [0]), ([1], [5])]))] == [True, False]


@pytest.mark.parametrize("batch_tokens", (1, 70, 200, 100_000))
@pytest.mark.parametrize("share", (True, False))
@pytest.mark.parametrize("row", (10, 50, 512))
def test_scores_do_not_depend_on_the_batch(binary, batch_tokens, share, row, monkeypatch):
    """Neither on the rows that sequences are packed in, nor on whether a prefix is in the row or its keys and values are."""
    monkeypatch.setattr(scorer, "ROW", row)
    pairs = random_pairs(1) + arrays([(np.arange(n), [7, 8]) for n in range(3, 300, 16)])
    assert_close(HarnessLM(binary, batch_tokens=batch_tokens, share=share).score(pairs), HarnessLM(binary, share=False, batch_tokens=T).score(pairs))


def test_bfloat16_scores_in_float32(make_run):
    candidate = evaluate.open_checkpoint(make_run("binary"), "cpu", "bfloat16")
    pairs = random_pairs(2)[:20]
    got, exact = HarnessLM(candidate).score(pairs), HarnessLM(evaluate.open_checkpoint(make_run("binary"), "cpu", "float32")).score(pairs)
    assert max(abs(a - b) for (a, _), (b, _) in zip(got, exact)) < 2
    assert any(a * 16 % 1 for a, _ in got)  # a bfloat16 sum would be a multiple of 1/16


def test_sharing_saves_the_tokens_it_should(binary):
    seen = []
    counting = dataclasses.replace(binary, forward=lambda idx, **options: seen.append(idx.numel()) or binary.forward(idx, **options))
    context = list(range(40))
    pairs = arrays([(context, [i, i + 1]) for i in range(50, 58)])
    HarnessLM(counting).score(pairs)
    assert sum(seen) == 40 + 8 * 1  # the context once, then of each two-token answer its first token
    seen.clear()
    HarnessLM(counting, share=False).score(pairs)
    assert sum(seen) == 8 * 41
    seen.clear()
    HarnessLM(counting).score(arrays([(context, [i]) for i in range(5)]))  # one-token answers: one row, one place
    assert sum(seen) == 40
    seen.clear()
    HarnessLM(counting).score(arrays([(context + [100 + i // 4, i, 5], [200]) for i in range(200)]))
    assert sum(seen) == 39 + 200 * 4  # too long for one row: the context less its last token, then rows on its keys and values


def test_many_short_rows_that_share_one_token(binary):
    """Their group is too long for a row, and less its last token its prefix is empty."""
    pairs = arrays([([3], [i, i + 1, 7]) for i in range(300)])
    assert scorer.share_prefixes([np.concatenate(pair)[:-1] for pair in pairs], [1] * 300) == [(1, 0, 300)]
    assert_close(HarnessLM(binary).score(pairs), HarnessLM(binary, share=False).score(pairs))


def test_rows_are_packed_without_gaps(binary):
    seen, r = [], np.random.default_rng(7)
    counting = dataclasses.replace(binary, forward=lambda idx, **options: seen.append(idx.shape) or binary.forward(idx, **options))
    pairs = arrays([(r.integers(0, 320, n), [1]) for n in r.integers(4, T, 300)])
    HarnessLM(counting).score(pairs)
    assert sum(b * t for b, t in seen) < 1.1 * sum(len(context) for context, _ in pairs)
    assert [t for _, t in seen] == sorted((t for _, t in seen), reverse=True)  # memory trouble shows at once


def test_cost_is_linear_in_the_requests(binary):
    seen = []
    counting = dataclasses.replace(binary, forward=lambda idx, **options: seen.append(idx.numel()) or binary.forward(idx, **options))
    costs = []
    for n in (40, 80):
        r = np.random.default_rng(3)
        seen.clear()
        HarnessLM(counting).score(arrays([(c := r.integers(0, 320, 20), r.integers(0, 320, 5)) for _ in range(n) for _ in range(1)]))
        costs.append(sum(seen))
    assert costs[1] == 2 * costs[0]


def saving(rows, length):
    """Return what rows that share a prefix of this length save, less the cost of sharing."""
    again = (len(rows) - 1) * length
    return again - (sum(map(len, rows)) - again) / scorer.SHARING_COST


def most_saved(rows, limits):
    """The definition, recursively: rows are one group, or cut wherever fewest tokens are common."""
    if len(rows) < 2:
        return 0
    common = [min(limits[i], limits[i + 1], len(os.path.commonprefix([rows[i].tolist(), rows[i + 1].tolist()]))) for i in range(len(rows) - 1)]
    whole = saving(rows, min(common))
    cuts = [0, *(i + 1 for i, n in enumerate(common) if n == min(common)), len(rows)]
    return max(whole, sum(most_saved(rows[a:b], limits[a:b]) for a, b in itertools.pairwise(cuts)))


def test_share_prefixes_example_and_optimum(monkeypatch):
    rows = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in ("abcd", "abcef", "abcg", "xy")]
    monkeypatch.setattr(scorer, "SHARING_COST", math.inf)
    assert scorer.share_prefixes(rows, [len(row) for row in rows]) == [(3, 0, 3), (0, 3, 4)]
    assert scorer.share_prefixes([], []) == []
    for cost in (math.inf, 32, 8, 2):
        monkeypatch.setattr(scorer, "SHARING_COST", cost)
        for seed in range(40):
            r = np.random.default_rng(seed)
            drawn = {tuple(np.repeat(r.integers(0, 2, 5), r.integers(1, 5, 5)).tolist()) for _ in range(8)}
            rows = [np.array(row, np.int32) for row in sorted(drawn)]
            limits = [len(row) - 1 for row in rows]
            groups = scorer.share_prefixes(rows, limits)
            assert [start for _, start, _ in groups] + [len(rows)] == [0] + [end for _, _, end in groups]
            for length, start, end in groups:
                assert all(row[:length].tolist() == rows[start][:length].tolist() and length <= limit
                           for row, limit in zip(rows[start:end], limits[start:end]))
            saved = sum(saving(rows[start:end], length) for length, start, end in groups if length)
            assert saved == pytest.approx(most_saved(rows, limits))


def test_many_nested_prefixes_need_no_recursion():
    rows = [np.zeros(n, np.int32) for n in range(1, 3000)]
    groups = scorer.share_prefixes(rows, [len(row) for row in rows])
    assert groups[-1][2] == len(rows)


@pytest.mark.parametrize("row", (10, T))
def test_memory_trouble_halves_the_batch(binary, capsys, row, monkeypatch):
    monkeypatch.setattr(scorer, "ROW", row)

    def forward(idx, cache=None, **options):
        if idx.numel() > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return binary.forward(idx, cache=cache, **options)
    pairs = random_pairs(4)
    lm = HarnessLM(dataclasses.replace(binary, forward=forward), batch_tokens=1000)
    assert_close(lm.score(pairs), HarnessLM(binary).score(pairs))
    assert lm.batch_tokens < 1000 and "continuing with --batch_tokens=" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="shape"):
        HarnessLM(dataclasses.replace(binary, forward=lambda *a, **k: (_ for _ in ()).throw(RuntimeError("shape")))).score(pairs)


def test_interrupted_evaluation_continues(binary, tmp_path):
    calls = []

    def dies(idx, **options):
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return binary.forward(idx, **options)
    pairs = random_pairs(5)
    with pytest.raises(KeyboardInterrupt):
        HarnessLM(dataclasses.replace(binary, forward=dies), batch_tokens=64, cache=tmp_path / "finished").score(pairs)
    with open(tmp_path / "finished.0", "a") as file:
        file.write("0123456789abcdef0123")  # a torn line
    again = []
    lm = HarnessLM(dataclasses.replace(binary, forward=lambda idx, **options: again.append(1) or binary.forward(idx, **options)),
                   batch_tokens=64, cache=tmp_path / "finished")
    assert len(lm.finished) > 5
    assert_close(lm.score(pairs), HarnessLM(binary).score(pairs))
    whole = []
    HarnessLM(dataclasses.replace(binary, forward=lambda idx, **options: whole.append(1) or binary.forward(idx, **options)), batch_tokens=64).score(pairs)
    assert len(again) < len(whole)


# ---------------------------------------------------------------------------------------------- requests, as the harness has them

def test_token_spans_the_join():
    """EV-01: finite values, at least one scored token each."""
    joins = {"Ans": [1], "Answer": [2], "wer": [3], "x:": [4, 5], "x: C": [4, 5, 6], " C": [6], "hello wor": [7, 8], "hello world": [7, 9], "ld": [10]}
    lm = HarnessLM(stub(uniform, lambda texts, special: [joins[text] for text in texts]))
    pairs = lm.encode_pairs([("Ans", "wer"), ("hello wor", "ld"), ("x:", " C")])
    assert [(a.tolist(), b.tolist()) for a, b in pairs] == [([1], [3]), ([7, 8], [10]), ([4, 5], [6])]
    assert all(math.isfinite(nats) and nats < 0 for nats, _ in lm.score(pairs))


PAIRS = [("The capital is ", "Paris"), ("The capital is", " Paris"), ("a  ", "b"), ("a\n", "b"), ("a \n ", " b"), ("a\t", "b"), ("Question: x\nAnswer:", " A"),
         ("1", "2"), ("12 ", "3"), ("naïve", " café"), ("é", "é"), ("x", "\n"), ("x", "  y"), ("'", "s it"), ("don", "'t"), ("A.", " B."), ("日本", "語"),
         ("end", "."), ("a b c", " d e f"), ("0.5 ", "0.25")]


@pytest.mark.parametrize("name", ("ours", "smollm2"))
def test_pairs_are_encoded_as_the_harness_does(name, tokenizer_file):
    """EV-02: also with spaces at the join."""
    path = tokenizer_file if name == "ours" else SHARED / "smollm2" / "tokenizer.json"
    if not path.is_file():
        pytest.skip("../shared/smollm2 is not there")
    tokenizer = load_tokenizer(path)
    lm = HarnessLM(stub(uniform, lambda texts, special: [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]))
    for pair, (context, continuation) in zip(PAIRS, lm.encode_pairs(PAIRS)):
        assert (context.tolist(), continuation.tolist()) == TemplateLM._encode_pair(lm, *pair)
    moved = lm.encode_pairs([("The capital is ", "Paris"), ("The capital is", " Paris")])
    assert all((a == b).all() for a, b in zip(*moved))


def test_empty_context_takes_the_prefix_token(binary):
    """EV-04: by hand, with the end-of-text id in front."""
    ids = binary.encode(["Hello there"], False)[0]
    lm = HarnessLM(binary)
    assert_close(lm.loglikelihood([request("", "Hello there"), request("  ", "x")]), [direct(binary, [0], ids), direct(binary, [0], binary.encode(["  x"], False)[0])])
    assert lm.prefix_token_id == 0 and binary.prefix_reason
    assert HarnessLM(stub(uniform)).loglikelihood([request("", "\0a")]) == [(pytest.approx(-math.log(256)), False)]  # it is there already


@pytest.mark.parametrize("input,offset,exact", (("binary", "0", True), ("gf2", "0", True), ("gf2", "5", False), ("learned", "0", False)))
def test_zero_code_boundary(make_run, input, offset, exact):
    """The paper: with an empty context fixed codes with b = 0 assign exactly ln V to the first token; the others do not."""
    candidate = evaluate.open_checkpoint(make_run(input, code_offset=offset), "cpu", "float32")
    nats = [HarnessLM(candidate).loglikelihood([request("", c)])[0][0] for c in "aQ5"]
    assert [nat == pytest.approx(-math.log(512), abs=1e-6) for nat in nats] == [exact] * 3
    assert ("ln V" in candidate.note) == exact


@pytest.mark.parametrize("n", (0, 1, 2, 2047, 2048, 2049, 5000))
def test_rolling_windows_score_each_token_once(n):
    """EV-06, and the same windows as the harness's."""
    lm = HarnessLM(stub(uniform))
    assert lm.loglikelihood_rolling([request("a" * n, kind="loglikelihood_rolling")]) == [pytest.approx(-n * math.log(256), rel=1e-5)]
    ids = np.random.default_rng(0).integers(1, 256, n).astype(np.int32)
    theirs = [make_disjoint_window(window) for window in get_rolling_token_windows(ids.tolist(), 0, 2048, 1)]
    ours = [(row[:len(row) - len(targets) + 1].tolist(), targets.tolist()) for row, targets in lm.cut(np.zeros(1, np.int32), ids)]
    assert ours == theirs


def test_truncation_keeps_the_end_and_is_counted():
    """EV-07: counts equal a direct count on prompts that straddle the limit."""
    seen = []
    lm = HarnessLM(stub(lambda idx, select=None, **_: seen.append(idx) or uniform(idx, select)), share=False)
    text = "".join(chr(1 + i % 200) for i in range(3000)).replace(" ", "x").replace("\n", "x")
    (cut, _), (alone, _) = lm.score(lm.encode_pairs([(text, "hello"), (text[-2044:], "hello")]))
    assert cut == alone and [idx.shape for idx in seen] == [(1, 2048)]  # one distinct input
    for n in (2041, 2042, 2043, 2044, 2045, 2046, 3000):
        lm.audit.clear()
        lm.loglikelihood([request(text[:n], "hello"), request("a", "b")])
        assert lm.audit["task"]["n_truncated"] == (n + 5 > 2049) and lm.audit["task"]["n_requests"] == 2


def test_long_and_empty_continuations(binary):
    """EV-08: a continuation longer than the model is read in windows; an empty one scores 0; the others are as alone."""
    r = np.random.default_rng(6)
    long = [r.integers(0, 320, n) for n in (T, T + 1, T + 40)]
    pairs = arrays([([3], ids) for ids in long] + [([3, 4], []), ([3, 4], [5])])
    got = HarnessLM(binary).score(pairs)
    windows = lambda ids: [direct(binary, *window) for window in map(make_disjoint_window, get_rolling_token_windows(ids.tolist(), 3, T, 1))]  # noqa: E731
    assert_close(got, [(sum(n for n, _ in windows(ids)), all(g for _, g in windows(ids))) for ids in long] + [(0.0, True), direct(binary, [3, 4], [5])])
    assert HarnessLM(stub(uniform)).loglikelihood([request("a", ""), request("", "")]) == [(0.0, True)] * 2


def test_max_length_beyond_the_model_is_refused(binary):
    with pytest.raises(ValueError, match=f"--max_length={T + 1}: .* takes 1 to {T}"):
        HarnessLM(binary, max_length=T + 1)


def test_audit_is_over_the_multiset(binary):
    def hashes(requests, candidate=binary):
        lm = HarnessLM(candidate)
        lm.loglikelihood(requests)
        return [sorted(lm.audit["task"][key]) for key in ("prompts", "tokens")]
    requests = [request("a b", " c", doc_id=0), request("a b", " d", doc_id=0), request("x", " y", doc_id=1)]
    assert hashes(requests) == hashes(requests[::-1])
    assert hashes(requests) != hashes(requests[:2] + [request("x", " z", doc_id=1)])  # a continuation, which prompt_hash misses
    assert hashes(requests) != hashes(requests[:2] + [request("x", " y", doc_id=2)])
    other = dataclasses.replace(binary, encode=lambda texts, special: [[1, *ids] for ids in binary.encode(texts, special)])
    (prompts, tokens), (same, differ) = hashes(requests), hashes(requests, other)
    assert prompts == same and tokens != differ


@needs_shared
@pytest.mark.parametrize("name", ("hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande", "openbookqa", "commonsense_qa", "lambada_openai",
                                  "wikitext", "wikitext_max1024", "mmlu_5shot", "mmlu"))
def test_token_ids_equal_the_reference(name):
    """The harness's own unmodified tasks give, request for request, the ids that its hf backend was given."""
    reference = json.loads((SHARED / "eval" / "reference_smollm2_135m_instruct.json").read_text())["tasks"][name]
    tokenizer = load_tokenizer(SHARED / "smollm2" / "tokenizer.json")
    max_length = 1024 if name.endswith("1024") else 2048
    lm = HarnessLM(stub(uniform, lambda texts, special: [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]),
                   max_length=max_length)
    loaded = harness.load_tasks([reference["task"]], reference["num_fewshot"], SHARED / "eval" / "data")
    digest, n = hashlib.sha256(), 0
    for task in loaded["tasks"].values():
        with contextlib.redirect_stderr(io.StringIO()):
            task.build_all_requests(limit=reference["limit_per_task"], rank=0, world_size=1)
        if reference["task"] == "wikitext":
            texts = lm.encode_all([r.args[0] for r in task.instances])
            pairs = [(row[:len(row) - len(targets) + 1], targets) for r in task.instances
                     for row, targets in lm.cut(np.zeros(1, np.int32), texts[r.args[0]])]
        else:
            pairs = lm.encode_pairs([r.args for r in task.instances])
        n += len(pairs)
        for pair in pairs:
            digest.update(json.dumps([part.tolist() for part in pair]).encode())
    assert (digest.hexdigest(), n) == (reference["tokens_sha256"], reference["n_requests"])


@needs_shared
def test_truncated_requests_of_mmlu_are_counted():
    """The compact set, one question a subject: 8 of 228 five-shot requests are over 2048, 24 over 1024."""
    tokenizer = load_tokenizer(SHARED / "smollm2" / "tokenizer.json")
    encode = lambda texts, special: [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]  # noqa: E731
    loaded = harness.load_tasks(["mmlu"], 5, SHARED / "eval" / "data")
    for max_length, expected in ((2048, 8), (1024, 24)):
        lm = HarnessLM(stub(uniform, encode), max_length=max_length)
        lm.score = lambda pairs: [(-1.0, False)] * len(pairs)
        tasks, groups = harness.run_tasks(lm, loaded, limit=1)
        assert sum(task["n_truncated"] for task in tasks.values()) == expected and len(groups["mmlu"]["tasks"]) == 57
    assert {task["num_fewshot"] for task in tasks.values()} == {5} and list(groups) == ["mmlu"]


# ---------------------------------------------------------------------------------------------- tasks of our own

@pytest.fixture(scope="session")
def tasks_dir(tmp_path_factory):
    """A folder of harness tasks with data of their own: multiple choice, log-likelihood, pages, generation."""
    folder = tmp_path_factory.mktemp("tasks")
    docs = [{"q": f"What is {i} and {i}?", "choices": ["naïve café", "plain cafe", str(2 * i)], "gold": i % 3, "text": TEXTS[i % 3] * (1 + i)} for i in range(8)]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "few.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs[:2]))
    base = (f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/docs.jsonl\n    train: {folder}/few.jsonl\n"
            "test_split: test\ntraining_split: train\nfewshot_split: train\nmetadata:\n  version: 3\n")
    for name, rest in {
        "own_choice": "output_type: multiple_choice\ndoc_to_text: '{{q}} Answer:'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: gold\n"
                      "metric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        "own_word": "output_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: ' yes'\nmetric_list:\n  - metric: perplexity\n  - metric: acc\n",
        "own_page": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list:\n  - metric: word_perplexity\n"
                    "  - metric: byte_perplexity\n  - metric: bits_per_byte\n",
        "own_text": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: 'x'\ngeneration_kwargs:\n  until: [\"e\"]\n  max_gen_toks: 6\n"
                    "metric_list:\n  - metric: exact_match\n"}.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{base}{rest}")
    return folder


@pytest.fixture(scope="session")
def own_tasks(tasks_dir):
    """load_tasks without the harness's own 14,000 files."""
    def load(*names, num_fewshot=None):
        return harness.load_tasks(list(names), num_fewshot, include_path=tasks_dir)
    return load


def no_tasks():
    """The harness's index without its own 14,000 files, which it would read even for tasks that are given as objects."""
    from lm_eval.tasks import TaskManager
    return TaskManager(include_defaults=False)


def test_metrics_are_the_harness_s_own(binary, own_tasks):
    """All kinds of request, against lm_eval.simple_evaluate with a plain one-by-one LM."""
    import lm_eval

    class OneByOne(HarnessLM):
        def score(self, pairs):
            return [HarnessLM.score(HarnessLM(binary, share=False), [pair])[0] for pair in pairs]
    names = ("own_choice", "own_word", "own_page")
    tasks, _ = harness.run_tasks(HarnessLM(binary), own_tasks(*names))
    results = lm_eval.simple_evaluate(OneByOne(binary), tasks=list(own_tasks(*names)["tasks"].values()), bootstrap_iters=harness.BOOTSTRAP_ITERS, task_manager=no_tasks())["results"]
    for name in names:
        for metric, value in tasks[name]["metrics"].items():
            theirs = results[name][f"{metric},none"]
            assert value == theirs if isinstance(theirs, str) else value == pytest.approx(theirs, rel=1e-5)
    choice = tasks["own_choice"]
    assert choice["version"] == 3 and choice["n_docs"] == 8 and choice["n_requests"] == 24 and choice["metrics"]["acc_stderr"] > 0
    assert choice["docs"]["loglikelihood"] == [responses[i % 3][0] for i, responses in enumerate(choice["docs"]["responses"])]
    accuracy = choice["docs"]["acc"]
    assert choice["metrics"]["acc"] == np.mean(accuracy)
    p = np.mean(accuracy)
    assert choice["metrics"]["acc_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 7))  # the paper's standard error


def test_acc_norm_counts_characters(own_tasks):
    """EV-11: 'naïve café' is 10 characters and 12 bytes; by bytes the other choice would win."""
    lm = HarnessLM(stub(uniform))
    lm.loglikelihood = lambda requests, **_: [(lm.note(r, r.args, (np.zeros(1), np.zeros(1))), ({" naïve café": -11.0, " plain cafe": -10.5}.get(r.args[1], -99.0), False))[1]
                                              for r in requests]
    tasks, _ = harness.run_tasks(lm, own_tasks("own_choice"))
    assert tasks["own_choice"]["docs"]["acc_norm"] == [1.0 if i % 3 == 1 else 0.0 for i in range(8)]


def test_harness_caches_work(binary, own_tasks, tmp_path, monkeypatch):
    """EV-16: cache_requests, log_samples and use_cache; the second call, from the cache, gives the same."""
    import lm_eval
    import lm_eval.caching.cache
    monkeypatch.setattr(lm_eval.caching.cache, "PATH", str(tmp_path))
    first, second = [lm_eval.simple_evaluate(HarnessLM(binary), tasks=list(own_tasks("own_choice", "own_text")["tasks"].values()), cache_requests=True,
                                             log_samples=True, use_cache=str(tmp_path / "cache"), bootstrap_iters=0, limit=2, task_manager=no_tasks()) for _ in range(2)]
    assert first["results"] == second["results"]
    assert [s["resps"] for s in first["samples"]["own_choice"]] == [s["resps"] for s in second["samples"]["own_choice"]]


def test_more_shots_than_examples(binary, own_tasks):
    """EV-18: a clear message, or fewer shots that are said; --limit does not cut the examples."""
    tasks, _ = harness.run_tasks(HarnessLM(binary), own_tasks("own_choice", num_fewshot=2), limit=1)
    assert tasks["own_choice"]["num_fewshot"] == 2
    with pytest.raises(ValueError, match="own_choice: 5 examples are asked for, but it has 2; give --num_fewshot=2"):
        own_tasks("own_choice", num_fewshot=5)


def test_generation_is_greedy_and_stops(binary, own_tasks):
    lm = HarnessLM(binary)
    tasks, _ = harness.run_tasks(lm, own_tasks("own_text"))
    texts = [response[0] if isinstance(response, list) else response for response in tasks["own_text"]["docs"]["responses"]]
    prompt = binary.encode(["What is 0 and 0?"], True)[0]
    ids = []
    for _ in range(6):  # greedy, by full forward passes
        at = torch.tensor([len(prompt) + len(ids) - 1])
        ids.append(binary.forward(torch.tensor([prompt + ids]), select=(at * 0, at))[0, :binary.n_ids].argmax().item())
    assert texts[0] == binary.decode(ids).split("e")[0] and all("e" not in text for text in texts)
    assert tasks["own_text"]["n_truncated"] == 0
    # What a prompt loses is counted with the room that its continuation needs: 6 tokens.
    shorter = HarnessLM(binary, max_length=len(prompt) + 5)
    tasks, _ = harness.run_tasks(shorter, own_tasks("own_text"), limit=1)
    assert tasks["own_text"]["n_truncated"] == 1


# ---------------------------------------------------------------------------------------------- the command line

def run(*arguments, **options):
    """Run evaluate.py with arguments; return (exit code, stdout, last line of stderr)."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **options.pop("environment", {})}
    done = subprocess.run([sys.executable, *options.pop("launcher", ()), str(ROOT / "evaluate.py"), *map(str, arguments)], capture_output=True, text=True,
                          cwd=options.pop("cwd", ROOT), env=environment, timeout=120)
    return done.returncode, done.stdout, (done.stderr.strip().splitlines() or [""])[-1]


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
    return evaluate.main()


def test_score_writes_and_prints_the_protocol(make_run, tasks_dir, monkeypatch, capsys):
    """EV-14 and the protocol: every number has what is needed to repeat it."""
    directory = make_run("binary", step=9)
    call(monkeypatch, "score", directory, "--tasks=own_choice,own_page", "--limit=2", f"--include_path={tasks_dir}", "--dtype=bfloat16", "--device=cpu")
    out = capsys.readouterr().out
    result = json.loads((directory / "own_choice+own_page_limit2-00000009.json").read_text())
    assert set(result["protocol"]) >= {"lm_eval", "max_length", "truncation", "dtype", "prefix_token_id", "prefix_token", "note", "batch_tokens", "share", "data", "limit"}
    assert result["protocol"]["max_length"] == T and result["protocol"]["dtype"] == "bfloat16" and "ln V = 6.2383" in result["protocol"]["note"]
    assert len(result["model"]["weights_sha256"]) == 64 and result["tasks"]["own_choice"]["n_docs"] == 2
    call(monkeypatch, "score", directory, "--tasks=own_choice", "--num_fewshot=0", "--limit=2", f"--include_path={tasks_dir}", "--device=cpu")
    assert (directory / "own_choice_0shot_limit2-00000009.json").exists()  # not in the place of the task's own number
    for said in ("lm-eval 0.4.13", "max_length 64", "bfloat16", "id 0, the end-of-text token", "ln V = 6.2383", "own_choice", "acc_norm", "truncated"):
        assert said in out
    assert not list(directory.glob(".finished*"))


def test_torchrun_gives_the_same(make_run, tasks_dir, monkeypatch, capsys):
    directory = make_run("binary", step=11)
    arguments = ("score", directory, "--tasks=own_choice,own_page", f"--include_path={tasks_dir}", "--device=cpu")
    call(monkeypatch, *arguments)
    target = directory / "own_choice+own_page-00000011.json"
    one = json.loads(target.read_text())
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "evaluate.py", *map(str, arguments)],
                          capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0 and "it/s" not in done.stderr, done.stderr[-2000:]  # no bar where there is no terminal
    two = json.loads(target.read_text())
    assert done.stdout.count("own_choice ") == 1 and two["protocol"]["processes"] == 2  # one process prints
    for name, task in one["tasks"].items():
        assert task["prompts_sha256"] == two["tasks"][name]["prompts_sha256"]
        np.testing.assert_allclose(two["tasks"][name]["docs"]["loglikelihood"], task["docs"]["loglikelihood"], atol=1e-4)
    assert not list(directory.glob(".finished*"))


def test_missing_data_is_one_line(make_run, tmp_path):
    """EV-13: without network and without data."""
    code, out, error = run("score", make_run("binary"), "--tasks=hellaswag", environment={"HF_HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1"})
    assert not list(make_run("binary").glob(".finished*"))  # nothing is left behind
    assert code == 1 and error.startswith("evaluate.py: hellaswag:") and "Rowan/hellaswag" in error and "--data_dir=DIR" in error


def test_local_benchmarks_do_not_cut_off_the_hub(tmp_path):
    """With --data_dir a data set is there or missing, at once; a --hf model that is scored next is still fetched."""
    code = (f"from machinery import harness\ntry:\n    harness.load_tasks(['piqa'], data_dir={str(tmp_path)!r})\n"
            "except FileNotFoundError as error:\n    print(error)\n"
            "import huggingface_hub\nprint('hub offline:', huggingface_hub.constants.HF_HUB_OFFLINE)")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    del environment["HF_HUB_OFFLINE"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert "piqa: its data set cannot be loaded" in done.stdout and done.stdout.endswith("hub offline: False\n"), done.stderr[-500:]


@pytest.mark.parametrize("arguments,code,said", (
    (["score"], 2, "name a CHECKPOINT"),
    (["score", "RUN", "--suite=paper", "--tasks=piqa"], 2, "--suite has its own tasks"),
    (["score", "RUN", "--suite=papers"], 2, "invalid choice"),
    (["score", "RUN", "--limit=3"], 2, "give --tasks or --suite too"),
    (["score", "RUN", "--num_fewshot=0"], 2, "give --tasks or --suite too"),
    (["score", "RUN", "--tasks=piqa", "--data=x"], 2, "--data is for the held-out loss"),
    (["probe", "RUN"], 1, "does not say what data it was trained on"),
    (["score", "RUN", "--no_such_flag"], 2, "unrecognized arguments: --no_such_flag"),
    (["score", "RUN", "--no_share=False"], 2, "ignored explicit argument"),
    (["score", "RUN"], 1, "give --data=DIR"),
    (["score", "/no/such/run"], 1, "/no/such/run"),
    (["score", "RUN", "--tasks=piqa", "--data_dir=/no/such"], 1, "/no/such"),
    (["score", "RUN", "--tasks=piqa", "--max_length=65"], 1, "takes 1 to 64"),
    (["sample", "RUN", "--prompt", ""], 1, "--prompt is empty"),
    (["sample", "RUN", "--temperature=-1"], 1, "temperature=-1"),
    (["export", "RUN", "RUN"], 1, "exists; name a directory"),
    (["import", "RUN", "/tmp/x"], 1, "config.json"),
))
def test_mistakes_are_one_line(make_run, monkeypatch, capsys, arguments, code, said):
    directory = str(make_run("binary"))
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *(directory if argument == "RUN" else argument for argument in arguments)])
    try:
        evaluate.main()
    except SystemExit as error:
        got, message = error.code, capsys.readouterr().err
    except (ValueError, OSError) as error:  # main's caller prints them as one line and exits with 1
        got, message = 1, str(error)
    assert got == code and said in message and len(message.splitlines()) == 1
    assert code == 1 or message.startswith("evaluate.py")


def test_utf16_ids(make_run, tmp_path, monkeypatch, capsys):
    """A run on UTF-16 code units samples; no tokenizer of Hugging Face's has these ids, so it has no export."""
    directory = tmp_path / "run"
    directory.mkdir()
    for path in make_run("binary", vocab_size=65_536, n_embd=64).iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "tokenizer.json").write_bytes(UTF16_JSON)
    call(monkeypatch, "sample", directory, "--prompt", "aé🙂", "--max_new_tokens=3", "--device=cpu")
    assert capsys.readouterr().out.startswith("aé🙂")
    with pytest.raises(ValueError, match="UTF-16 code units"):
        huggingface.export_checkpoint(directory, tmp_path / "hf")


def test_reference_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        huggingface.open_reference("x", "cpu", "float32")


def test_tokenizer_larger_than_the_model_is_refused(make_run):
    with pytest.raises(ValueError, match="320 ids, but the model"):
        evaluate.open_checkpoint(make_run("learned", vocab_size=300), "cpu", "float32")


# ---------------------------------------------------------------------------------------------- held-out loss

@pytest.fixture(scope="session")
def prepared(tmp_path_factory, tokenizer_file):
    folder = tmp_path_factory.mktemp("data")
    texts = [TEXTS[i % 3] * (1 + i % 7) + str(i) for i in range(60)]
    (folder / "docs.jsonl").write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    subprocess.run([sys.executable, "prepare.py", f"--source={folder}/docs.jsonl", f"--tokenizer={tokenizer_file}", f"--out={folder}/ready",
                    "--val_fraction=0.3"], check=True, cwd=ROOT, capture_output=True)
    return folder / "ready"


def test_heldout_equals_direct_computation(binary, prepared):
    from machinery.shards import open_shards
    result = evaluate.score_heldout(HarnessLM(binary), prepared)
    nats, targets = [], []
    for shard in open_shards(prepared, "val"):
        tokens, starts = shard.map()
        for start, end in zip(starts[:-1], starts[1:]):
            ids, total = tokens[start:end].astype(np.int64).tolist(), 0.0
            for at in range(0, len(ids) - 1, T):
                total -= direct(binary, ids[at:at + 1], ids[at + 1:at + T + 1])[0]
            nats.append(total)
            targets.append(len(ids) - 1)
    assert [d["targets"] for d in result["documents"]] == targets and len(targets) > 10 and max(targets) > T
    assert [d["nats"] for d in result["documents"]] == pytest.approx(nats, rel=1e-5)
    loss = sum(nats) / sum(targets)
    assert result["loss"] == pytest.approx(loss, rel=1e-6) and result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / sum(d["bytes"] for d in result["documents"]), rel=1e-6)
    # The standard error against a bootstrap over documents.
    r, n = np.random.default_rng(0), len(nats)
    draws = r.integers(n, size=(4000, n))
    assert result["loss_stderr"] == pytest.approx((np.array(nats)[draws].sum(1) / np.array(targets)[draws].sum(1)).std(), rel=0.15)


def test_heldout_from_the_command_line(make_run, prepared, monkeypatch, capsys):
    directory = make_run("learned", vocab_size=320, n_embd=36)
    call(monkeypatch, "score", directory, f"--data={prepared}", "--device=cpu")
    assert "bits/byte" in capsys.readouterr().out and json.loads((directory / "heldout-00000007.json").read_text())["loss"] > 0


# ---------------------------------------------------------------------------------------------- sampling

def test_sampling(make_run, monkeypatch, capsys):
    """GN-01, several prompts, seeds: the same seed gives the same text, the next sample another."""
    def sample(*arguments):
        call(monkeypatch, "sample", make_run("binary"), "--max_new_tokens=30", "--device=cpu", *arguments)
        return capsys.readouterr().out
    greedy = sample("--temperature=0", "--prompt", "def", "The quick")
    assert greedy == sample("--temperature=0", "--prompt", "def", "The quick") and greedy.count("-" * 80) == 2
    assert greedy.startswith("def") and "\nThe quick" in greedy
    assert sample("--temperature=1e-8", "--prompt", "def", "The quick") == greedy
    two = sample("--num_samples=2", "--seed=5", "--prompt", "def").split("-" * 80 + "\n")
    assert two[0] != two[1] and two[1] == sample("--seed=6", "--prompt", "def").split("-" * 80 + "\n")[0]


def test_ids_without_a_token_are_never_sampled(make_run, monkeypatch):
    """GN-03: a head of 512 rows, a tokenizer of 320 ids."""
    candidate = evaluate.open_checkpoint(make_run("binary"), "cpu", "float32")
    ids = [i for seed in range(8) for i in candidate.generate([5], 60, 5.0, None, torch.Generator().manual_seed(seed))]
    assert len(ids) > 100 and max(ids) < candidate.n_ids == 320 and candidate.decode(ids)


@pytest.mark.parametrize("pieces", ((7,), (3, 4), (1, 6)))
def test_cached_decoding_equals_a_full_forward(make_run, pieces):
    """GN-05: also a prompt that is read in two pieces."""
    model, _ = load_model(make_run("gf2"))
    ids = torch.randint(0, 512, (2, 27), generator=torch.Generator().manual_seed(0))
    cache, logits, at = model.new_cache(), [], 0
    with torch.no_grad():
        for n in (*pieces, *[1] * 20):
            logits.append(model(ids[:, at:at + n], cache=cache)[0])
            at += n
        torch.testing.assert_close(torch.cat(logits, 1), model(ids)[0], atol=1e-4, rtol=0)


def test_positions_mask_and_select_change_nothing_by_themselves(make_run):
    model, _ = load_model(make_run("binary"))
    ids = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids)[0]
        mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
        torch.testing.assert_close(model(ids, positions=torch.arange(9).expand(2, 9), mask=mask)[0], expected, atol=1e-5, rtol=1e-5)
        rows, columns = torch.tensor([1, 0, 1]), torch.tensor([8, 2, 0])
        torch.testing.assert_close(model(ids, select=(rows, columns))[0], expected[rows, columns], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- Hugging Face

@pytest.mark.parametrize("input,fields", (("learned", {}), ("tied", {}), ("lowdim", {}), ("lowdim", {"lift": "interleave"}), ("binary", {}),
                                          ("binary", {"code_values": "pm1", "code_scale": "matched"}), ("gf2", {}), ("gf2", {"code_offset": "1f"}),
                                          ("random", {}), ("sinusoid", {"lift": "interleave"})))
def test_export_and_import_give_the_checkpoint_back(make_run, tmp_path, input, fields):
    directory = make_run(input, **fields)
    huggingface.export_checkpoint(directory, tmp_path / "hf")
    path = huggingface.import_folder(tmp_path / "hf", tmp_path / "run")
    (model, state), (back, restored) = load_model(directory), load_model(path)
    assert back.config == model.config and restored["step"] == 7 and restored["eot_id"] == 0
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in model.state_dict().items())
    assert (path.parent / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    config, card = json.loads((tmp_path / "hf" / "config.json").read_text()), (tmp_path / "hf" / "README.md").read_text()
    assert config["nanobit"]["input"] == input and ("fixed, not trained" in card) == (input in ("binary", "gf2", "random", "sinusoid"))
    if input == "gf2":
        assert config["nanobit"]["matrix"] == model.model.embed_tokens.matrix.tolist() and config["nanobit"]["lift"] == "tile"
    with pytest.raises(FileExistsError):
        huggingface.import_folder(tmp_path / "hf", tmp_path / "run")


def test_exported_input_matrix_is_the_tiled_codebook(make_run, tmp_path):
    from safetensors.torch import load_file
    huggingface.export_checkpoint(make_run("gf2"), tmp_path / "hf", "bfloat16")
    weight = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    codebook = load_model(make_run("gf2"))[0].model.embed_tokens.codebook
    assert weight.dtype == torch.bfloat16 and weight.shape == (512, 36)
    assert all(torch.equal(weight[:, 9 * i:9 * i + 9].to(torch.uint8), codebook) for i in range(4))


@pytest.mark.parametrize("input", ("binary", "gf2"))
def test_import_refuses_a_matrix_that_is_not_the_code(make_run, tmp_path, input):
    from safetensors.torch import load_file, save_file
    huggingface.export_checkpoint(make_run(input), tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.embed_tokens.weight"][3, 5] += 1e-3
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ValueError, match=f"is not the {input} code"):
        huggingface.import_folder(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change,said", (({"model_type": "gpt2"}, "model_type gpt2"), ({"attention_bias": True}, "attention_bias True"), ({"hidden_act": "gelu"}, "hidden_act"),
                                         ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_type llama3"), ({"num_hidden_layers": 3}, "Missing key"),
                                         ({"head_dim": 64}, "head_dim 64 .expected 18")))
def test_import_refuses_what_the_decoder_is_not(make_run, tmp_path, change, said):
    huggingface.export_checkpoint(make_run("learned"), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=said):
        huggingface.import_folder(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def transformers():
    module = pytest.importorskip("transformers", reason="transformers is optional")
    module.logging.set_verbosity_error()
    return module


@pytest.mark.parametrize("input", ("learned", "binary", "gf2"))
def test_exported_folder_loads_in_transformers(make_run, tmp_path, transformers, input):
    huggingface.export_checkpoint(make_run(input), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours, _ = load_model(make_run(input))
    ids = torch.randint(0, 512, (2, T), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids)[0], atol=1e-4, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "The quick brown fox <|endoftext|> 42"
    assert tokenizer.bos_token_id == 0 and tokenizer.decode(tokenizer(text.replace("<|endoftext|>", ""))["input_ids"]) == text.replace("<|endoftext|>", "")


def test_scores_through_the_harness_s_backend_equal_ours(make_run, tmp_path, transformers):
    """Our checkpoint, the exported folder as a reference model, and the harness's own hf backend, on one set of requests."""
    pytest.importorskip("accelerate", reason="the hf backend needs accelerate")
    from lm_eval.models.huggingface import HFLM
    directory = make_run("gf2")
    huggingface.export_checkpoint(directory, tmp_path / "hf")
    hf = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=3, max_length=T)
    lms = [HarnessLM(evaluate.open_checkpoint(directory, "cpu", "float32")),
           *(HarnessLM(huggingface.open_reference(str(tmp_path / "hf"), "cpu", "float32"), share=share) for share in (True, False))]
    pairs = [*PAIRS, ("", "Hello there"), ("word " * 80, "and more"), ("The quick brown fox", " jumps"), ("The quick brown fox", " jumps over")]
    requests = [request(*pair) for pair in pairs]
    expected = hf.loglikelihood(requests, disable_tqdm=True)
    pages = [request(text * n, kind="loglikelihood_rolling") for text in TEXTS for n in (1, 9)]
    rolling = hf.loglikelihood_rolling(pages, disable_tqdm=True)
    stop = [request(text, {"until": ["\n"], "max_gen_toks": 8}, kind="generate_until") for text in TEXTS]
    texts = hf.generate_until(stop, disable_tqdm=True)
    for lm in lms:
        assert lm.max_length == T and lm.prefix_token_id == hf.prefix_token_id
        assert_close(lm.loglikelihood(requests), expected, 1e-3)
        assert lm.loglikelihood_rolling(pages) == pytest.approx(rolling, abs=1e-2)
        assert_close(lm.score(random_pairs()), lms[0].score(random_pairs()), 1e-3)
    assert lms[1].generate_until(stop) == texts


def test_a_tokenizer_s_bos_is_kept_for_references(make_run, tmp_path, transformers):
    """EV-19: a reference model gets what its own tokenizer adds in front, ours gets nothing; an empty context gets the prefix once."""
    from tokenizers.processors import TemplateProcessing
    huggingface.export_checkpoint(make_run("learned"), tmp_path / "hf")
    tokenizer = load_tokenizer(tmp_path / "hf" / "tokenizer.json")
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    ours, theirs = (HarnessLM(c) for c in (evaluate.open_checkpoint(make_run("learned"), "cpu", "float32"), huggingface.open_reference(str(tmp_path / "hf"), "cpu", "float32")))
    for lm, front in ((ours, []), (theirs, [0])):
        (context, continuation), (empty, first) = lm.encode_pairs([("The quick", " brown"), ("", "The")])
        assert context.tolist()[:3] == (front + ours.encode_pairs([("The quick", " brown")])[0][0].tolist())[:3] and 0 not in continuation
        assert empty.tolist() == [0] and 0 not in first


@pytest.mark.parametrize("tied", (True, False))
def test_import_of_a_llama_with_shared_heads(tokenizer_file, tmp_path, transformers, tied):
    """Grouped key/value heads repeated, and a tied table written out, change no logit; eps and theta are its own."""
    config = transformers.LlamaConfig(vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                                      max_position_embeddings=T, rms_norm_eps=1e-3, rope_theta=500.0, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    ours, state = load_model(huggingface.import_folder(tmp_path / "hf", tmp_path / "run"))
    assert ours.config.input == "learned" and ours.config.norm_eps == 1e-3 and ours.config.rope_theta == 500
    ids = torch.randint(0, 320, (2, T), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, atol=1e-4, rtol=0)


REAL = os.environ.get("REFERENCE_MODEL")  # the folder that ../shared/eval/make_reference_model.py builds


@needs_shared
@pytest.mark.skipif(not REAL, reason="REFERENCE_MODEL does not name the real model's folder")
@pytest.mark.parametrize("kind", ("imported", "reference"))
def test_real_weights_equal_the_reference(tmp_path, kind, request):
    """Real SmolLM2-135M-Instruct weights against what the harness's own backend gave: 20 documents of two tasks."""
    if kind == "imported":
        candidate = evaluate.open_checkpoint(huggingface.import_folder(REAL, tmp_path), "cpu", "float32")
    else:
        request.getfixturevalue("transformers")
        candidate = huggingface.open_reference(REAL, "cpu", "float32")
    reference = json.loads((SHARED / "eval" / "reference_smollm2_135m_instruct.json").read_text())["tasks"]
    tasks, _ = harness.run_tasks(HarnessLM(candidate), harness.load_tasks(["winogrande", "commonsense_qa"], 0, SHARED / "eval" / "data"), limit=20)
    for name, task in tasks.items():
        expected = [row[4] for row in reference[name]["docs"][name][:20]]
        np.testing.assert_allclose(np.array(task["docs"]["responses"], float), np.array(expected, float), atol=1e-3)
