"""What a run costs before it runs, and the loss that keeps the logits small."""

import pytest
import torch
from training import Forks

import kernels
import train
from machinery import costs
from model import Decoder, ModelConfig


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


# --- the dry run

def test_dry_run_needs_no_data_and_states_every_part(forks, tmp_path):
    """The paper's model: 27.38 GB of weights, gradients and moments; logits by rows, not 3.2 GB."""
    argv = ["--preset=paper", "--input=gf2", "--dry_run", f"--out={tmp_path / 'run'}",
            "--device=cpu", "--dtype=bfloat16"]
    assert forks.run(argv) == [0], forks.output()
    for figure in ("1,711,376,384", "1,610,713,088", "100,663,296", "786,704", "1,712,163,088",
                   "1,711,276,032", "100,352", "27.38 GB", "10.27 G", "0.604 G"):
        assert figure in forks.output()
    line = next(line for line in forks.output().splitlines() if line.startswith("memory"))
    terms = line.split(" = ")[1].split(";")[0].split(" + ")
    parts = {word: float(size) for word, size in map(str.split, terms)}
    assert parts["parameters"] == 6.85 and parts["optimizer"] == 13.69
    assert 6.8 < parts["gradients"] < 7.7 and parts["logits"] < 1
    assert "time for 100,000,000,000 targets" in forks.output()
    assert not (tmp_path / "run").exists()


def test_dry_run_of_a_compiled_run_counts_its_whole_logits(forks, tmp_path):
    """8 rows x 256 positions x 3072 ids in float32, and their gradient."""
    argv = ["--preset=smoke", "--dry_run", f"--out={tmp_path}", "--device=cpu", "--compile"]
    assert forks.run(argv) == [0], forks.output()
    assert "the logits exist whole: up to 0.05 GB more" in forks.output()


def test_dry_run_takes_the_rate_of_a_log_that_a_crash_cut(forks, tmp_path):
    (tmp_path / "log.jsonl").write_text(
        '{"step": 1, "targets_per_second": 1234.0}\n{"step": 2, "targets_per')
    argv = ["--preset=smoke", "--dry_run", f"--out={tmp_path}", "--device=cpu"]
    assert forks.run(argv) == [0], forks.output()
    assert f"at 1,234 targets/s (as measured in {tmp_path})" in forks.output()


def test_dry_run_cuts_the_micro_batch_as_the_run_does(tmp_path, monkeypatch, capsys):
    environment = dict(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    argv = ["train.py", "--preset=smoke", "--dry_run", "--device=cpu", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr("sys.argv", argv)
    train.main()
    said = capsys.readouterr().out
    assert "each of 2 processes (ddp), micro_batch 4," in said  # of 8 windows an update


# --- the estimate of memory

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["none", "block", "selective"])
def test_estimate_counts_what_a_real_step_allocates(kind, dtype):
    """Against the same count over real tensors (the whole process is measured in tests/bench)."""
    config = ModelConfig(vocab_size=512, block_size=64, n_layer=3, n_head=2, n_embd=36, n_ffn=96)
    parts = costs.estimate_memory(config, 4, dtype, kind, accumulation=1)
    model, idx = Decoder(config), torch.zeros(4, 64, dtype=torch.int64)
    model.checkpoint_activations = kind
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16",
                              cache_enabled=False)
    with costs.LiveBytes(lambda tensor: "all") as live:
        with autocast:
            loss = model(idx, idx)[1]
        loss.backward()
    estimate = parts["gradients"] + parts["activations"] + parts["logits"]
    assert abs(estimate / live.peak["all"] - 1) < 0.05
    held = sum(p.numel() for p in model.parameters()) * 4
    assert parts["parameters"] == held and parts["optimizer"] == 2 * held
    # Hardly an activation: all gradients at the peak, one for each parameter and one on its way.
    few = costs.estimate_memory(config, 1, dtype, kind, accumulation=2)
    assert held <= few["gradients"] < 1.5 * held


def test_estimate_for_a_gpu_keeps_no_attention_weights():
    """They are kept on a CPU in BF16: 3 layers, 4 rows, 2 heads, for each 128 queries the keys up
    to them, 2 bytes."""
    config = ModelConfig(vocab_size=512, block_size=256, n_layer=3, n_head=2, n_embd=36, n_ffn=96)
    cpu, gpu = (
        sum(costs.estimate_memory(config, 4, "bfloat16", "none", device=device).values())
        for device in ("cpu", "cuda:0"))
    assert cpu - gpu == pytest.approx(3 * 4 * 2 * 128 * (128 + 256) * 2, rel=0.2)


# --- the loss in chunks

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_in_chunks_equals_cross_entropy(monkeypatch, dtype):
    """Also with rows that do not count, a last chunk that is not full, a scaled gradient, and none
    at all to count (0)."""
    monkeypatch.setattr(kernels, "LOSS_ROWS", 7)
    torch.manual_seed(1)
    x = torch.randn(30, 12, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 12, requires_grad=True)
    targets = torch.randint(-1, 50, (30,))
    loss = kernels.LinearCrossEntropy.apply(x, weight, targets, True)
    found = torch.autograd.grad(loss / 3, (x, weight))
    logits = x @ weight.to(dtype).t()
    expected = torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=-1)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    exact = dtype == torch.float32
    near = dict(rtol=1e-5, atol=1e-6) if exact else dict(rtol=2e-2, atol=2e-3)
    for gradient, wanted in zip(found, torch.autograd.grad(expected / 3, (x, weight))):
        torch.testing.assert_close(gradient, wanted, **near)
    none = torch.full((30,), -1)
    assert kernels.LinearCrossEntropy.apply(x, weight, none, False) == 0


@pytest.mark.parametrize("grad", [True, False], ids=["train", "validate"])
def test_whole_logits_never_exist(grad):
    """4096 rows x 8192 ids are 134 MB in float32; a quarter of the rows is there at a time, with
    its gradient."""
    def kind(tensor):
        return "logits" if tensor.shape[-1:] == (8192,) else "rest"

    config = ModelConfig(vocab_size=8192, block_size=4096, n_layer=1, n_head=1, n_embd=26, n_ffn=8)
    with costs.FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(grad):
        model, idx = Decoder(config), torch.zeros(1, 4096, dtype=torch.int64)
        with costs.LiveBytes(kind) as live:
            loss = model(idx, idx)[1]
            if grad:
                loss.backward()
    assert 0 < live.peak["logits"] < 3.1 * 1024 * 8192 * 4 < 4096 * 8192 * 4
