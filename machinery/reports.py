"""What train.py tells while it runs: console, log.jsonl, trackers, profiler; rate and ETA."""

import importlib
import math
import time
from pathlib import Path

import torch

from machinery.errors import explained, first_line, warn
from machinery.machine import peak_flops, peak_memory_gb
from machinery.runs import FREE_ON_RESUME, NOT_RECORDED, experiment_of, write_row
from machinery.settings import all_flags


def expectation(args, presets, milestones):
    """Return in words the validation losses that a run of a preset can be expected to print.

    Args:
        milestones: {(preset, input): {updates: loss}}, as measured.
    """
    measured = milestones.get((args.preset, args.input))
    usual = {name: default for name, (_, default, _) in all_flags().items()} | presets[args.preset]
    other = FREE_ON_RESUME | NOT_RECORDED | {"input", "seed", "dtype", "decay_steps"}
    same = set(usual) - other | {"max_targets", "init_from"}
    changed = [name for name in same if getattr(args, name) != usual[name]]
    if not measured or changed or args.decay_steps != args.steps:
        return "expected: nothing is known; no such run has been measured"
    losses = [f"{loss:.2f} after {step:,} updates" for step, loss in measured.items()]
    return f"expected, as measured: validation loss {', '.join(losses)}"


class Reporter:
    """Tells how a run goes. A rate is taken over updates alone, no evaluation or save among them.

    Args:
        log: the run's open log.jsonl in the first process; None in the others, which write nothing.
        flops: of one target, divided by the number of devices.
        say: print, or in the other processes what is silent.
    Raises ValueError for a tracker that cannot be started.
    """

    def __init__(self, args, log, flops, device, say):
        self.args, self.log, self.flops, self.device, self.say = args, log, flops, device, say
        asked = [flag for flag in TRACKERS if getattr(args, flag)] if log else []
        self.trackers = {flag: open_tracker(flag, args) for flag in asked}
        self.profiler = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """End the trackers, which may have rows to write or to send yet."""
        for flag, (_, finish) in self.trackers.items():
            self.attempt(flag, finish)

    def start(self):
        """Say that the first update comes next."""
        if self.args.profile and self.log:
            self.profiler = start_profiler(self.args.out)
        self.start_clock()

    def start_clock(self):
        """Take the rate anew from here."""
        self.since, self.updates = time.perf_counter(), 0

    def after_update(self):
        self.updates += 1
        if self.profiler:
            self.profiler.step()

    def training(self, step, loss, lr, norm):
        """Report the loss (nats per target) and gradient norm of an update; waits for the device.
        """
        targets = step * self.args.tokens_per_step
        done = self.updates * self.args.tokens_per_step
        rate = done / (time.perf_counter() - self.since)
        left = int((self.args.steps * self.args.tokens_per_step - targets) / rate)
        memory, peak = peak_memory_gb(self.device), peak_flops(self.device)
        held = f"  {memory:.2f} GB" if memory else ""
        mfu = f"MFU {rate * self.flops / peak:.1%}  " if peak else ""
        self.say(f"step {step:6,}  targets {targets:,}  loss {loss:.4f}  lr {lr:.3e}  "
                 f"norm {norm:.3f}  {rate:,.0f} targets/s  {mfu}"
                 f"ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}{held}")
        self.write(step=step, targets=targets, loss=loss.item(), lr=lr, grad_norm=norm.item(),
                   targets_per_second=rate, memory_gb=memory)
        self.start_clock()

    def validation(self, step, loss, bytes_per_target):
        """Report the validation loss, in nats per target."""
        bits_per_byte = loss / math.log(2) / bytes_per_target
        self.say(f"step {step:6,}  validation loss {loss:.4f}  bits per byte {bits_per_byte:.4f}")
        self.write(step=step, targets=step * self.args.tokens_per_step, val_loss=loss,
                   val_bits_per_byte=bits_per_byte)
        self.start_clock()

    def write(self, **row):
        """Append a row to log.jsonl, once for all processes."""
        if not self.log:
            return
        try:
            write_row(self.log, row)
        except OSError as error:  # a full disk costs the row, not the run
            warn(f"step {row['step']}: log row not written: {error}")
        known = {key: value for key, value in row.items() if value is not None}
        for flag, (tell, _) in self.trackers.items():
            self.attempt(flag, tell, known)

    def attempt(self, flag, call, *values):
        """Call a tracker; where that fails, it costs what was to be told, not the run."""
        try:
            call(*values)
        except Exception as error:  # each package has kinds of its own
            warn(f"--{flag}: not told: {first_line(error)}")


def open_tensorboard(module, args):
    """Return (what takes a row, what ends it): event files in the run's directory."""
    writer = module.SummaryWriter(args.out)

    def tell(row):
        for key, value in row.items():
            writer.add_scalar(key, value, row["step"])
        writer.flush()

    return tell, writer.close


def open_project(module, args):
    """Return (what takes a row, what ends it) of trackio, or of wandb, whose interface it has.

    A launch is a run there, and the launches of one run directory are a group: so an interrupted
    run goes on, and another in its place is not mixed with it.
    """
    name = Path(args.out).name
    run = module.init(project="nanobit", name=name, group=name, config=experiment_of(args))

    def tell(row):
        run.log(row, step=row["step"])

    return tell, module.finish


TRACKERS = {  # flag, the package's name too: (module, advice, what opens it)
    "tensorboard": ("torch.utils.tensorboard", "see that it can write to --out", open_tensorboard),
    "trackio": ("trackio", "see that it can write to TRACKIO_DIR", open_project),
    "wandb": ("wandb", "run wandb login first, or set WANDB_MODE=offline", open_project)}


def open_tracker(flag, args):
    """Return (what takes a row, what ends it) of the tracker that a flag names.

    Raises ValueError where its package is not installed, or does not start.
    """
    module, advice, open_it = TRACKERS[flag]
    try:
        module = importlib.import_module(module)
    except ImportError:
        raise ValueError(f"--{flag}: the package is not installed; pip install {flag}") from None
    with explained(f"--{flag}", advice):
        return open_it(module, args)


def start_profiler(out):
    """Return a profiler that is to be told of each update; it writes the third to fifth as
    out/trace.json."""
    def write(done):
        done.export_chrome_trace(str(Path(out) / "trace.json"))
    updates = torch.profiler.schedule(skip_first=1, wait=0, warmup=1, active=3, repeat=1)
    profiler = torch.profiler.profile(schedule=updates, on_trace_ready=write)
    profiler.start()
    return profiler
