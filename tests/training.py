"""Training runs for the tests: one small configuration and two ways of running it."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import train
from machinery.checkpoints import read_checkpoint
from machinery.files import HELD
from machinery.runs import list_checkpoints

ROOT = Path(__file__).parents[1]
UPDATES = 20
# Two streams x 8 windows an update; a visit to a shard lasts three updates. Five validation windows
# divide by no number of processes.
SIZES = dict(vocab_size=300, n_layer=2, n_head=2, n_embd=36, n_ffn=48, block_size=32,
             dtype="float32", device="cpu", tokens_per_step=512, micro_batch=8, max_lr=3e-3,
             min_lr=3e-4, warmup_steps=5, windows_per_visit=24, eval_windows=5, eval_every=10,
             log_every=1, save_every=5)
TINY = [f"--{name}={value}" for name, value in SIZES.items()]


def flags(data, out, **changes):
    """Return the flags of a run of 20 updates, or with other values."""
    whole = dict(data=data, out=out, max_targets=512 * UPDATES, decay_steps=UPDATES)
    values = SIZES | whole | changes
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in values.items()]


def run_here(monkeypatch, data, out, **changes):
    """Train in this process; return the last checkpoint."""
    monkeypatch.setattr(sys, "argv", ["train.py", *flags(data, out, **changes)])
    assert train.main() == 0
    return read_checkpoint(list_checkpoints(out)[0])


# A process that has imported torch once and forks a training process for each order:
# {"start": ...} answers with its id, {"wait": id} with its exit code.
FORKS = """
import json, os, resource, runpy, sys, time, traceback
import torch, torch._dynamo, train  # dynamo: AdamW imports it
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        status = os.waitpid(order["wait"], 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    code = 1
    try:
        for number, path in ((1, order["stdout"]), (2, order["stderr"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.environ.update(order["env"])
        torch.set_num_threads(1)
        sys.argv = ["train.py", *order["argv"]]
        exec(order["fault"])
        runpy.run_path(train.__file__, run_name="__main__")
    except SystemExit as done:
        code = done.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
"""


class Forks:
    """Runs train.py without a start of Python and torch for each run."""

    def __init__(self, folder):
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        self.process = subprocess.Popen([sys.executable, "-c", FORKS], cwd=ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **order):
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def start(self, argv, fault="", **env):
        """Return the id of a run's process. `fault` is code that it executes first."""
        return self.ask(start=True, argv=list(map(str, argv)), fault=fault, env=env,
                        stdout=str(self.stdout), stderr=str(self.stderr))

    def wait(self, pid):
        return self.ask(wait=pid)

    def run(self, argv, fault="", processes=1):
        """Return the exit codes of a run, as torchrun would start it where there is more than one
        process."""
        self.stdout.write_text("")
        self.stderr.write_text("")
        if processes == 1:
            return [self.wait(self.start(argv, fault))]
        env = self.environment(processes)
        pids = [self.start(argv, fault, RANK=str(rank), LOCAL_RANK=str(rank), **env)
                for rank in range(processes)]
        return [self.wait(pid) for pid in pids]

    def environment(self, processes):
        """Return what torchrun tells its processes, but for their numbers."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        return dict(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                    WORLD_SIZE=str(processes))

    def output(self):
        return self.stdout.read_text() + self.stderr.read_text()

    def refused(self, argv, fault="", processes=1):
        """Return the one line on stderr of a run that must end in it."""
        codes = self.run(argv, fault, processes)
        line = self.stderr.read_text()
        assert set(codes) in ({1}, {2}, {HELD}), (codes, line)
        assert line.count("\n") == 1 and line.startswith("train.py: "), line
        return line

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class FirstUpdate(Exception):
    """Raised in the place of the first update."""


def fake_cuda(monkeypatch, at_update):
    """Have torch report a CUDA device, whose tensors have shapes and no contents (they cannot be
    trained); the first update calls at_update(step_model, optimizer, batch, ...) and raises
    FirstUpdate."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor, device):
        with mode:
            moved = mode.from_tensor(tensor.detach()).to(device)
            return torch.nn.Parameter(moved) if isinstance(tensor, torch.nn.Parameter) else moved

    def module_to(self, device):
        for module in self.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = fake(tensor, device)
        return self

    def update(*args):
        at_update(*args)
        raise FirstUpdate

    def on_fake_device(function):
        def call(*args, **kwargs):
            with mode:
                return function(*args, **kwargs)
        return call

    facts = dict(is_available=True, device_count=2, is_bf16_supported=True,
                 get_device_name="an H200", max_memory_allocated=0)
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    # The check of torch.cuda.set_device is torch's own; only what would reach for a driver goes.
    monkeypatch.setattr(torch._C, "_cuda_setDevice", lambda index: None, raising=False)
    monkeypatch.setattr(torch.nn.Module, "to", module_to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    plain_to = torch.Tensor.to

    def tensor_to(self, *args, **kwargs):
        to_cuda = args and isinstance(args[0], torch.device) and args[0].type == "cuda"
        if to_cuda and not isinstance(self, FakeTensor):
            return fake(self, args[0])
        return plain_to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", tensor_to)
    for name in ("zeros", "randint"):
        monkeypatch.setattr(torch, name, on_fake_device(getattr(torch, name)))
    monkeypatch.setattr(train, "evaluate", lambda *_: 0.0)  # data decide there, which a fake lacks
    monkeypatch.setattr(train, "update", update)


def fault_at(call, action):
    """Return code that has a training process do `action` in its call number `call` of the loss of
    a micro-batch in training."""
    return f"""
import math, model, signal
calls, whole = [0], model.Decoder.loss
def loss(self, x, targets):
    calls[0] += self.training
    result = whole(self, x, targets)
    if calls[0] == {call} and self.training:
        {action}
    return result
model.Decoder.loss = loss
"""


def rows(out, key="loss"):
    """Return the rows of a log that have this key; they all must be whole."""
    lines = (Path(out) / "log.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def values(out, key="loss"):
    return [row[key] for row in rows(out, key)]


def final_path(out):
    return Path(out) / f"step-{UPDATES:08d}.pt"


def final(out):
    return read_checkpoint(final_path(out))


def furthest(a, b):
    """Return the greatest distance of two models' values, from their weights by name."""
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


def same_state(a, b):
    """Return whether two checkpoints hold the same weights and moments, bit for bit."""
    moments = [state["optimizer"]["state"] for state in (a, b)]
    assert a["model"].keys() == b["model"].keys() and moments[0].keys() == moments[1].keys()
    pairs = [(a["model"][name], b["model"][name]) for name in a["model"]]
    for name, state in moments[0].items():
        pairs += [(state[key], moments[1][name][key]) for key in state]
    return a["step"] == b["step"] and all(torch.equal(one, two) for one, two in pairs)


def assert_same_run(a, b):
    """Weights, moments and log rows, bit for bit."""
    assert same_state(final(a), final(b))
    for key in ("loss", "val_loss"):
        one, two = ([(row["step"], row[key]) for row in rows(out, key)] for out in (a, b))
        assert one == two


def assert_near(found, expected, tolerance=2e-5):
    """Nats, in float32, over 20 updates."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
