"""Benchmarks: lm-evaluation-harness's own tasks run on machinery/harness.py's model, and the
results as plain values and as a table. For evaluate.py."""

import contextlib
import functools
import logging
import math
import os
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from machinery.errors import CACHE_PLACE, explained
from machinery.files import sha256
from machinery.harness import HarnessLM

# Where the harness keeps them: to index all its 14,000 files takes 5 seconds, these a few
# hundredths.
TASK_FOLDERS = {
    "wikitext": "wikitext", "hellaswag": "hellaswag", "arc_easy": "arc", "arc_challenge": "arc",
    "piqa": "piqa", "winogrande": "winogrande", "openbookqa": "openbookqa",
    "commonsense_qa": "commonsense_qa", "lambada_openai": "lambada", "mmlu": "mmlu/default"}
BOOTSTRAP_ITERS = 1000  # of the harness, for LAMBADA's perplexity alone; its default of 100,000
#                         takes half a minute
FEWSHOT_SEED = 1234     # the harness's default


def find_tasks(names, include_path=None):
    """Return the harness's TaskManager of the named tasks. Raises ValueError for an unknown one."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks import __file__ as tasks_file
    own = [str(Path(include_path).resolve())] if include_path else []
    folders = []
    for name in names:
        if name in TASK_FOLDERS:
            folders.append(str(Path(tasks_file).parent / TASK_FOLDERS[name]))
    manager = TaskManager(include_defaults=False, include_path=own + folders)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=own)
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"--tasks: no task {name!r}; lm-eval ls tasks lists all, "
                             "--include_path=DIR adds others")
    return manager


def set_shots(name, task, num_fewshot):
    """Set how many worked examples a task has; None keeps its own number. Raises ValueError for
    more than there are."""
    if num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config("num_fewshot", num_fewshot)  # 0 in a task's file is meant, the harness says
    shots = task.get_config("num_fewshot")
    if not shots:
        task.set_config("num_fewshot", 0)
    else:
        n = len(list(task.fewshot_docs()))
        if task.fewshot_cfg.split == task.config.test_split:
            n -= 1  # a document is no example for itself
        if n < shots:
            raise ValueError(f"{name}: {shots} examples are asked for, but it has {n}; "
                             f"give --num_fewshot={n}")
    task.set_fewshot_seed(FEWSHOT_SEED)


def load_tasks(names, num_fewshot=None, data_dir=None, include_path=None):
    """Return the harness's own tasks, {"tasks": {name: Task}, "groups": {name: Group}, ...}.

    Args:
        data_dir: a folder of hub-shaped copies (ORG/NAME/*.jsonl with a README.md that names the
            configurations), where the data sets are found by their own names; None takes the hub,
            or its cache where HF_HUB_OFFLINE=1 is set.
        include_path: a folder of further task YAML files.
    Raises ValueError for an unknown task, FileNotFoundError for one whose data cannot be had.
    """
    if data_dir is not None:
        # What is not there is missing; a --hf model may still come from the hub.
        os.environ["HF_DATASETS_OFFLINE"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = find_tasks(names, include_path)
    loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        with explained(f"{name}: its data set cannot be loaded",
                       "give --data_dir=DIR with a copy of it in DIR/ORG/NAME", FileNotFoundError,
                       place=CACHE_PLACE):
            with contextlib.chdir(data_dir or "."):
                found = manager.load([name])
        for kind, members in found.items():
            loaded[kind] |= members
    for name, task in loaded["tasks"].items():
        set_shots(name, task, num_fewshot)
    return loaded


@contextlib.contextmanager
def quiet_bars():
    """Show the harness's own bars, one for each of MMLU's 57 subjects, on a terminal only, and
    clear them when they are full."""
    plain = tqdm.__init__
    tqdm.__init__ = functools.partialmethod(plain, disable=None, leave=False)
    try:
        yield
    finally:
        tqdm.__init__ = plain


def right_answer(task, sample):
    """Return the log-likelihood of a document's right answer, None where the task has no such."""
    gold, responses = 0, sample["filtered_resps"]
    if task.OUTPUT_TYPE == "multiple_choice":
        doc = sample["doc"]
        gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        if isinstance(gold, str):
            gold = task.doc_to_choice(doc).index(gold)
    if task.OUTPUT_TYPE == "generate_until":
        return None
    if not isinstance(gold, int) or not 0 <= gold < len(responses):
        return None
    response = responses[gold]
    return response if task.OUTPUT_TYPE == "loglikelihood_rolling" else response[0]


def evaluate(lm, loaded, limit):
    from lm_eval import evaluator
    lm.audit.clear()
    return evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=BOOTSTRAP_ITERS)


def bound_aggregations(task):
    """Let a task's metrics be infinite where they overflow; they lose their bootstrap."""
    def bound(aggregate):
        def bounded(items):
            try:
                return aggregate(items)
            except OverflowError:
                return math.inf
        return bounded

    aggregations = task.aggregation()
    for metric, aggregate in aggregations.items():
        aggregations[metric] = bound(aggregate)


def run_tasks(lm, loaded, limit=None):
    """Run loaded tasks; return ({task: entry}, {group that is in no other: {metrics, tasks}}) of
    plain values; an entry is describe_task's."""
    # Else the harness forks this process, model and all, for a bootstrap.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with contextlib.redirect_stdout(sys.stderr), quiet_bars():
        try:
            results = evaluate(lm, loaded, limit)
        except OverflowError:  # exp of more than 709 nats a word; the requests are scored by now
            for task in loaded["tasks"].values():
                bound_aggregations(task)
            results = evaluate(lm, loaded, limit)
    tasks = {}
    for name, task in loaded["tasks"].items():
        tasks[name] = describe_task(name, task, results, lm.audit[name])
    inner = set().union(*loaded["group_map"].values())
    groups = {}
    for name, group in loaded["groups"].items():
        if name not in inner:
            groups[name] = {"metrics": read_metrics(results["results"].get(name, {})),
                            "tasks": [task.task_name for task in group.get_all_tasks()]}
    return tasks, groups


def read_metrics(values):
    """Return {metric: value} of the harness's {"metric,filter": value, ...}."""
    return {key.removesuffix(",none"): value for key, value in values.items() if "," in key}


def describe_task(name, task, results, audit):
    """Return a task's entry of the scores file: its metrics as the harness defines them, version,
    num_fewshot, n_docs, n_requests, n_truncated, prompts_sha256 (over the sorted hashes of every
    (document, context, continuation)), tokens_sha256 (the same over ids), and docs: {doc_id,
    responses, loglikelihood (of the right answer), each metric}, lists over documents."""
    every = results["samples"][name]
    if not every:
        raise ValueError(f"{name}: no document was scored; its evaluation split is empty")
    samples = [sample for sample in every if sample["filter"] == every[0]["filter"]]
    docs = {"doc_id": [sample["doc_id"] for sample in samples],
            "responses": [sample["filtered_resps"] for sample in samples],
            "loglikelihood": [right_answer(task, sample) for sample in samples]}
    for metric in samples[0]["metrics"]:
        docs[metric] = [sample[metric] for sample in samples]
    return {
        "metrics": read_metrics(results["results"][name]),
        "version": results["versions"].get(name),
        "num_fewshot": results["n-shot"][name],
        "n_docs": len(samples),
        "n_requests": audit["n_requests"],
        "n_truncated": audit["n_truncated"],
        "prompts_sha256": sha256("".join(sorted(audit["prompts"])).encode()),
        "tokens_sha256": sha256("".join(sorted(audit["tokens"])).encode()),
        "docs": docs}


def score_suite(scorer, plan, dtype, limit=None, data_dir=None, include_path=None):
    """Run [(task names, shots), ...]; return the plain values of the scores file. A task that the
    plan has again, with other shots, is named after them: mmlu and mmlu_5shot."""
    lm, all_tasks, all_groups = HarnessLM(scorer), {}, {}
    for names, shots in plan:
        loaded = load_tasks(names.split(","), shots, data_dir, include_path)
        tasks, groups = run_tasks(lm, loaded, limit)
        mark = f"_{shots}shot" if tasks.keys() & all_tasks.keys() else ""
        for name, entry in tasks.items():
            all_tasks[name + mark] = entry
        for name, group in groups.items():
            members = [task + mark for task in group["tasks"]]
            all_groups[name + mark] = {"metrics": group["metrics"], "tasks": members}
    data = data_dir or "the hub or its cache"
    return {"model": lm.candidate.facts, "protocol": describe_protocol(lm, dtype, limit, data),
            "tasks": all_tasks, "groups": all_groups}


def describe_protocol(lm, dtype, limit, data):
    """Return what is needed to repeat the scores, beside the model and the tasks."""
    from lm_eval import __version__
    candidate, scorer = lm.candidate, lm.scorer
    return {
        "lm_eval": __version__, "max_length": lm.max_length, "truncation": "left", "dtype": dtype,
        "limit": limit, "prefix_token_id": candidate.prefix_id,
        "prefix_token": candidate.prefix_reason, "note": candidate.note,
        "batch_tokens": scorer.batch_tokens, "share": scorer.share, "device": str(scorer.device),
        "processes": scorer.parts, "torch": torch.__version__,
        "bootstrap_iters": BOOTSTRAP_ITERS, "data": data}


def print_suite(result):
    """Print the protocol, and a line for each group and each task in none."""
    m, p = result["model"], result["protocol"]
    limit = f", the first {p['limit']} documents of each task" if p["limit"] else ""
    note = f"; {p['note']}" if p["note"] else ""
    print(f"\n{m['name']}: weights {m['weights_sha256'][:12]}, "
          f"tokenizer {m['tokenizer_sha256'][:12]}, {p['dtype']}\n"
          f"  lm-eval {p['lm_eval']}, data: {p['data']}{limit}; max_length {p['max_length']}, "
          f"cut on the {p['truncation']}; {p['batch_tokens']:,} tokens a batch\n"
          f"  an empty context is id {p['prefix_token_id']}, {p['prefix_token']}{note}\n"
          f"{'task':18} {'version':>7} {'shots':>5} {'documents':>9} {'requests':>9} "
          f"{'truncated':>9}  metrics")
    grouped = set()
    for group in result["groups"].values():
        grouped.update(group["tasks"])
    for name, entry in {**result["tasks"], **result["groups"]}.items():
        if name not in grouped:
            print_line(name, entry, [result["tasks"][task] for task in entry.get("tasks", [name])])


def print_line(name, entry, tasks):
    """Print the table's line for a task, or for a group and its tasks."""
    docs = sum(task["n_docs"] for task in tasks)
    requests = sum(task["n_requests"] for task in tasks)
    cut = sum(task["n_truncated"] for task in tasks)
    metrics = [f"{key} {value:.4f}" for key, value in entry["metrics"].items()
               if isinstance(value, float)]
    print(f"{name:18} {tasks[0]['version']!s:>7} {tasks[0]['num_fewshot']:5} {docs:9,} "
          f"{requests:9,} {cut:9,}  " + "  ".join(metrics))
