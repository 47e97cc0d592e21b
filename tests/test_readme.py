"""The README's main command, as it stands there, on machines as its readers have them.

Each machine is a sitecustomize.py, which every Python started there executes first, and an
environment. The commands are the README's own, in a fresh copy of the project; flags at their end
make them short.
"""

import os
import shutil
import subprocess
import sys

import pytest
from stages import ROOT, WINDOWS, beginning_with
from training import FirstUpdate, fake_cuda

import prepare
import train

SHORT = {"prepare.py": ["--max_documents=90"],
         "train.py": ["--max_targets=4096", "--eval_windows=2", "--log_every=1"],
         "evaluate.py": ["--max_new_tokens=3"]}

# One core, and a GPU; torch is not imported where a command does without.
CONTAINER = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if any(name in " ".join(sys.orig_argv) for name in ("train.py", "evaluate.py")):
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.accelerator.current_accelerator = lambda *_, **__: None  # else its driver is looked for
"""
# Name: (sitecustomize.py, environment, flags at the end of what runs a model).
MACHINES = {
    "a container with CUDA, in a notebook": (CONTAINER, {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONIOENCODING": "ascii",
        "LC_ALL": "C", "HOME": "/dev/null/home", "USER": "", "LOGNAME": ""}, ["--device=cpu"]),
    "Windows": (WINDOWS, {"PYTHONIOENCODING": "cp1252"}, [])}


def main_commands():
    """Return the README's main command as a list of commands, without those that install."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("## Two commands")[1].split("```sh\n")[1].split("```")[0]
    commands = [part.split() for part in block.split("&&")]
    return [command for command in commands if command[1].endswith(".py")]


def fresh_copy(folder):
    """Copy what the main command needs into a new folder; return it."""
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "machinery", folder / "machinery",
                    ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_the_main_command_is_prepare_train_and_sample():
    assert [command[1] for command in main_commands()] == list(SHORT)


@pytest.mark.parametrize("name", MACHINES)
def test_the_main_command_works(name, tmp_path):
    first, settings, flags = MACHINES[name]
    clone = fresh_copy(tmp_path / "clone")
    environment = beginning_with(first, tmp_path / "site") | settings
    environment.pop("PYTHONUNBUFFERED", None)
    said = ""
    for _, script, *rest in main_commands():
        more = SHORT[script] + (flags if script != "prepare.py" else [])
        done = subprocess.run([sys.executable, script, *rest, *more], cwd=clone, text=True,
                              capture_output=True, timeout=120, encoding="utf-8",
                              env=environment)
        assert done.returncode == 0, f"{script}: {done.stderr[-3000:]}"
        assert "Error" not in done.stderr and "Warning" not in done.stderr, done.stderr
        said += done.stdout
    assert said.count("\npreset smoke (") == 1 and "validation loss" in said
    assert (clone / "out/smoke-binary-s1/step-00000002.pt").exists()
    if first == CONTAINER:
        assert "; 1 workers\n" in said or not hasattr(os, "sched_setaffinity")
        assert "preset smoke (CUDA is present, but data/fineweb-edu is not" in said


def test_the_main_command_comes_to_its_first_update_on_a_gpu(tmp_path, monkeypatch, capsys):
    """Its tensors there have no contents, so that is as far as it goes."""
    monkeypatch.chdir(tmp_path)
    prepared, trained, _ = main_commands()
    monkeypatch.setattr(sys, "argv", [*prepared[1:], *SHORT["prepare.py"], "--workers=1"])
    prepare.main()

    def look(step_model, optimizer, batch, *_):
        devices = {tensor.device.type for tensor in (*step_model.parameters(), *batch)}
        assert devices == {"cuda"}

    fake_cuda(monkeypatch, look)
    monkeypatch.setattr(sys, "argv", trained[1:])
    with pytest.raises(FirstUpdate):
        train.main()
    assert "\npreset smoke (CUDA is present" in capsys.readouterr().out
