"""The GPU script ``benchmarks/gpu/layer_stack.py``, by a toy run on the CPU and by its parts."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from zgcm_model import ModelConfig

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
TOY = ["--device", "cpu", "--toy", "--backend", "eager", "--steps", "1"]


@pytest.fixture(scope="module")
def script():
    """The script as a module, with the search path as it was."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("layer_stack", GPU / "layer_stack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def stack(script):
    return {
        name.removeprefix("stack."): module
        for name, module in sys.modules.items()
        if name.startswith("stack.")
    }


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_toy_run_measures_every_variant(script, tmp_path, capsys):
    assert script.main([*TOY, "--json", str(tmp_path / "out.jsonl")]) == 0
    found = records(tmp_path / "out.jsonl")
    rows = {r["variant"]: r for r in found if r["kind"] == "row"}
    assert list(rows) == list(script.ORDER)
    assert [r["format"] for r in found if r["kind"] == "peak"] == ["bf16", "fp8"]
    for name, row in rows.items():
        if "te" in name:
            assert (row["status"], row["reason"]) == ("skipped", "transformer_engine is not installed")
            continue
        assert row["status"] == "ok", row
        assert row["loss"] == pytest.approx(6.2, abs=0.2)
        assert (row["window_layers"], row["global_layers"]) == (1, 1)
        assert 0 < row["tokens_per_second_with_update"] < row["tokens_per_second"]
        assert row["tflops"] > 0
        assert set(row["fraction_of_peak"]) == {"bf16", "fp8"}
        assert all(
            row["where"][p] > 0 for p in ("attention", "projections", "feed-forward", "norms and other")
        )
        assert row["program_breaks"] == 0, name
        # One for window layers, one for global ones, one for the final norm.
        assert row["compiled_programs"] == (3 if name.endswith("compiled") else 0), name
    printed = capsys.readouterr().out
    assert "measured 4 variants" in printed
    assert "projections" in printed


def links_to_torch_alone(folder):
    """Fill a folder with links to torch and what it requires, and nothing else."""
    wanted, seen = ["torch"], set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        for requirement in package.requires or []:
            if "extra ==" not in requirement:
                wanted.append(re.match(r"[\w.-]+", requirement).group())
        for top in {Path(str(f)).parts[0] for f in package.files or []}:
            target = Path(package.locate_file(top))
            if top != ".." and target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


def test_torch_is_all_it_needs(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    links_to_torch_alone(site)
    assert not (site / "jaxtyping").exists()
    done = subprocess.run(
        [sys.executable, "-S", str(GPU / "layer_stack.py"), *TOY, "--variants", "bf16 eager"],
        env={"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured 1 variants" in done.stdout


def test_stand_ins_refuse_to_touch_checkpoints():
    code = "import safetensors.torch\nsafetensors.torch.save_file({}, 'x')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(GPU / "stand_ins"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert "pip install safetensors" in done.stderr


def test_a_failing_variant_is_named_and_the_others_go_on(script, tmp_path, monkeypatch, capsys):
    real = script.measure

    def measure(name, mode, settings, clock):
        if mode != "eager":
            raise RuntimeError("no compiler")
        return real(name, mode, settings, clock)

    monkeypatch.setattr(script, "measure", measure)
    out = tmp_path / "out.jsonl"
    assert script.main([*TOY, "--json", str(out), "--variants", "bf16 compiled", "bf16 eager"]) == 0
    rows = [r for r in records(out) if r["kind"] == "row"]
    assert [(r["variant"], r["status"]) for r in rows] == [
        ("bf16 compiled", "failed"),
        ("bf16 compiled apart", "failed"),
        ("bf16 eager", "ok"),
    ]
    assert rows[0]["error"] == "RuntimeError"
    assert "FAILED, RuntimeError: no compiler" in capsys.readouterr().out


def test_what_does_not_fit_is_tried_with_fewer_layers(script, monkeypatch):
    asked = []

    def measure(name, mode, settings, clock):
        asked.append((mode, settings.layers))
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(script, "measure", measure)
    assert script.main([*TOY, "--layers", "13", "--variants", "bf16 compiled"]) == 1
    assert asked == [("compiled", 13), ("compiled", 6)]


def test_variants_that_would_overrun_are_left_out_by_name(script, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert script.main([*TOY, "--json", str(out), "--budget-seconds", "-1", "--deadline-seconds", "60"]) == 1
    rows = [r for r in records(out) if r["kind"] == "row"]
    assert [r["variant"] for r in rows] == list(script.ORDER)
    assert {r["status"] for r in rows} == {"skipped"}
    assert "bf16 compiled: left out" in capsys.readouterr().out


def test_a_budget_learns_from_the_first_variant(stack):
    budget = stack["budget"].Budget(100.0, {"compiled": 60.0, "eager": 30.0})
    assert budget.allows("compiled")
    budget.learn("compiled", 150.0)
    assert not budget.allows("compiled")
    assert budget.allows("eager")


def test_the_watchdog_ends_a_hung_process(stack, capsys):
    ended = threading.Event()
    codes = []

    def end(code):
        codes.append(code)
        ended.set()

    stack["budget"].start_watchdog(0.01, lambda: "fp8-scaled_mm eager", end)
    assert ended.wait(10)
    assert codes == [stack["budget"].EXIT_WATCHDOG]
    assert "unfinished: fp8-scaled_mm eager" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gib", "mode", "layers"),
    [(139, "compiled", 32), (139, "eager", 19), (79, "compiled", 13), (20, "eager", 6)],
)
def test_as_many_layers_are_taken_as_fit(stack, gib, mode, layers):
    settings = stack["settings"]
    assert settings.Settings().config(mode, gib * 2**30).num_layers == layers
    assert settings.Settings(layers=12).config(mode, gib * 2**30).num_layers == 12


def test_figures_are_those_of_the_published_count(stack):
    measure, settings = stack["measure"], stack["settings"].Settings()
    config = ModelConfig.preset("zgcm-1-7b")
    times = measure.Timings(9.0, 1.0, 0.8, 0.02, 0.04, 0.1)
    figures = measure.summarize(
        measure.Measured(config, times, 12.0, 100.0), settings, {"bf16": 800e12, "fp8": 1600e12}, fp8=True
    )
    assert figures["tokens_per_second"] == 16384
    assert figures["tflops"] == pytest.approx(16384 * 42.731e-3, rel=1e-4)
    assert figures["tflops_if_all_full"] == pytest.approx(16384 * 53.433e-3, rel=1e-4)
    assert figures["tokens_per_second_with_update"] == pytest.approx(16384 / 1.1)
    assert figures["fraction_of_peak"]["fp8"] == pytest.approx(16384 * 42.731e9 / 1600e12, rel=1e-4)
    in_fp8, in_bf16 = 8.053e9 + 25.971e9 + 2.718e9, 3.806e9 + 2.183e9
    assert figures["fraction_of_bound"] == pytest.approx(
        16384 * (in_fp8 / 1600e12 + in_bf16 / 800e12), rel=1e-3
    )
    whole = figures["whole_model"]
    assert whole["tokens_per_second"] == pytest.approx(16384 / (27 * 0.02 + 5 * 0.04 + 0.1))


def test_work_is_told_apart_by_name_and_size(stack):
    where, config = stack["where"], ModelConfig.preset("zgcm-1-7b")
    expected = {
        ("aten::mm", (16384, 4096, 4096, 4096)): "projections",
        ("aten::_scaled_mm", (16384, 4096, 4096, 11008)): "feed-forward",
        ("aten::mm", (4096, 4096, 4096, 154880)): "head and loss",
        ("void softmax_kernel", (4096, 154880)): "head and loss",
        ("triton_tem_fused_flex_attention_0", ()): "attention",
        ("aten::_scaled_dot_product_flash_attention_for_cpu", (1, 4, 64, 16)): "attention",
        ("nvjet_hsh_128x256", ()): "projections",
        ("triton_poi_fused_mul_silu_3", ()): "norms and other",
    }
    found = {(name, sizes): where.classify(where.Work(name, sizes, 1.0), config) for name, sizes in expected}
    assert found == expected


def test_every_kernel_is_counted_once(stack):
    def event(name, kernels=(), shapes=(), us=0.0, device=DeviceType.CPU, announced=False):
        return SimpleNamespace(
            name=name,
            device_type=device,
            input_shapes=list(shapes),
            is_user_annotation=announced,
            kernels=[SimpleNamespace(name=k, duration=d) for k, d in kernels],
            time_range=SimpleNamespace(elapsed_us=lambda: us),
        )

    cuda = DeviceType.CUDA
    events = [
        event("aten::mm", [("nvjet_a", 30.0)], [[16, 4], [4, 8]]),
        event("aten::add", [("add_kernel", 5.0)], [[16, 4], []]),
        event("nvjet_a", us=30.0, device=cuda),
        event("add_kernel", us=5.0, device=cuda),
        event("triton_tem_fused_0", us=7.0, device=cuda),
        event("a range", us=42.0, device=cuda, announced=True),
        event("## Call CompiledFxGraph", us=42.0, device=cuda),
    ]
    found = stack["where"].gpu_work(events)
    assert [(w.name, w.sizes) for w in found] == [
        ("aten::mm", (16, 4, 4, 8)),
        ("add_kernel", (16, 4)),
        ("triton_tem_fused_0", ()),
    ]
    assert sum(w.seconds for w in found) == pytest.approx(42e-6)


def test_products_for_older_versions_equal_the_library(stack):
    from zgcm_model.precision.scaled_mm import ScaledMmProducts

    left, right = (torch.randn(32, 48).to(d) for d in (torch.float8_e5m2, torch.float8_e4m3fn))
    inverses = torch.tensor(0.5), torch.tensor(0.25)
    got, expected = (
        products(left, right, inverses, torch.bfloat16, fast=False)
        for products in (stack["build"].OlderProducts(), ScaledMmProducts())
    )
    assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_masks_exist_before_layers_are_compiled(stack):
    toy, build = stack["settings"].TOY, stack["build"]
    kernel = build.PrimedFlexKernel(compiled=False)
    kernel.prime(toy, 64, "cpu")
    assert {place[2] for place in kernel._masks} == {toy.window, None}
    made = dict(kernel._masks)
    query = torch.randn(1, 64, 4, 16)
    for window in (toy.window, None):
        kernel(query, query[:, :, :2], query[:, :, :2], window=window, documents=None)
    assert kernel._masks == made


@pytest.mark.parametrize("mode", ["eager", "compiled", "compiled apart"])
def test_layers_compile_without_changing_the_loss(stack, mode):
    settings = stack["settings"].Settings(device="cpu", toy=True, backend="eager")
    build = stack["build"]
    losses = []
    for each in ("eager", mode):
        model = build.build_stack(settings.config(each, 0), settings, "bf16", each)
        losses.append(model.micro_batch())
        model.update()
        losses.append(model.micro_batch())
    assert losses[:2] == losses[2:]
    assert losses[1] < losses[0]
