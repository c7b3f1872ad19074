"""The fit of the roofline's efficiencies: see benches/roofline_fit.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import kvrelay as kr

SOURCE = Path(__file__).parents[2] / "benches/roofline_fit.py"
spec = importlib.util.spec_from_file_location("roofline_fit", SOURCE)
fit = importlib.util.module_from_spec(spec)
# A dataclass looks its module up by name.
sys.modules["roofline_fit"] = fit
spec.loader.exec_module(fit)


@pytest.mark.parametrize(
    ("model", "gpu", "tp"),
    [
        ("llama-2-7b", "a100-80gb", 1),
        ("llama-2-70b", "a100-80gb", 4),
        ("llama-3.1-8b", "h100", 2),
        ("opt-13b", "a100-80gb", 1),
        ("opt-66b", "a100-80gb", 4),
        ("qwen3-32b", "h200", 2),
    ],
)
def test_steps_are_the_codes_own(model, gpu, tp):
    """The formulas, shapes and figures of the fit are those of the simulator, whole steps to 1e-5."""
    cluster = kr.Cluster("1M", model=model, gpu=gpu, tp=tp)
    share, shape, peaks = fit.code_efficiencies(), fit.SHAPES[model], fit.gpu(gpu)
    for tokens in (1, 200, 4000):
        sums = (1, tokens, tokens, tokens**2, 0, 0)
        ours = fit.step_seconds(shape, peaks, tp, share, prompt=tokens)
        assert ours == pytest.approx(cluster._core.step_time(sums, "mixed"), rel=1e-5), tokens
    for rows, context in ((1, 100), (64, 200_000)):
        sums = (0, 0, 0, 0, rows, context)
        ours = fit.step_seconds(shape, peaks, tp, share, rows=rows, context=context)
        assert ours == pytest.approx(cluster._core.step_time(sums, "mixed"), rel=1e-5), rows


def test_a_fit_finds_what_made_its_data(shared):
    kernels = fit.linear_kernels()
    made = kernels.assign(seconds=fit.linear_seconds(kernels, 0.63, 0.81, 8e-6))
    assert fit.fit_linear(made, (0.0, 8e-6, 16e-6)) == pytest.approx((0.63, 0.81, 8e-6))
    prompts = fit.sarathi_prompts()
    tokens = prompts["tokens"].to_numpy()
    exact = prompts.assign(seconds=0.02 + 1e-4 * tokens + 3e-9 * tokens**2)
    assert fit.square_coefficient(exact) == pytest.approx(3e-9)


def test_the_codes_linear_layers_are_those_fitted(shared):
    """On one GPU of its own, where a kernel is large enough for efficiencies alone to describe it."""
    code, table = fit.code_efficiencies(), fit.linear_layers()
    fitted = table.loc[("all", "all", "1")]
    assert fitted["flops"] == pytest.approx(code["linear_flops"], abs=0.02)
    assert fitted["bandwidth"] == pytest.approx(code["weight_bandwidth"], abs=0.03)
    alone = table.xs("1", level="tp")
    assert (alone["code median"] < 0.08).all() and (alone["code mean"] < alone["fitted mean"] + 0.015).all()


def test_the_codes_attention_is_that_of_newer_kernels(shared):
    """Sarathi's and DistServe's attention is slower; on steps that neither set was fitted on, the code's is
    the better."""
    implied, sets = fit.attention(), fit.candidates()
    assert np.nanmedian(implied["flops"]) < 0.3 < fit.code_efficiencies()["attention_flops"]
    assert sets.loc["code", "H200 steps"] < 0.05
    assert sets.loc["fitted", "H200 steps"] > 3 * sets.loc["code", "H200 steps"]
