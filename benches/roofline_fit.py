"""The efficiencies of the roofline, fitted on published measurements: `make roofline-fit`.

Linear layers are fitted on Vidur's kernel times, attention on Sarathi's prompts and DistServe's coefficients,
all-reduces on Vidur's collectives, each by the least mean |log(model / measured)|. Beside every fitted value
stands the one that the code uses, read from its source, with the errors of both; at the end both sets predict
whole steps that neither was fitted on. Reads the folder `shared` beside the checkout, as `reality.py` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT.parent / "shared/measured"
LATENCY = ROOT / "rust/core/src/latency"
BF16 = 2


@dataclass(frozen=True)
class Shape:
    """A dense model: layers, hidden size, query and KV heads of 128, inner size, vocabulary, matrices of a
    block (3 when gated)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    matrices: int = 3

    @property
    def layer_params(self) -> int:
        """Parameters of the linear layers of one layer."""
        attention = 2 * self.hidden * 128 * (self.heads + self.kv_heads)
        return attention + self.matrices * self.hidden * self.inner


SHAPES = {
    "llama-2-7b": Shape(32, 4096, 32, 32, 11008, 32000),
    "llama-2-70b": Shape(80, 8192, 64, 8, 28672, 32000),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "opt-13b": Shape(40, 5120, 40, 40, 20480, 50272, 2),
    "opt-66b": Shape(64, 9216, 72, 72, 36864, 50272, 2),
    "qwen3-32b": Shape(64, 5120, 64, 8, 25600, 151936),
    # Sarathi's; its figures are those of the model's published configuration.
    "yi-34b": Shape(60, 7168, 56, 8, 20480, 64000),
}
#: Vidur's files (microsoft/vidur, data/profiling, MIT). The shapes of Llama 3 are those of 3.1.
KERNELS = [
    ("a100-80gb", "llama-2-7b", "a100_meta-llama_Llama-2-7b-hf"),
    ("a100-80gb", "llama-2-70b", "a100_meta-llama_Llama-2-70b-hf"),
    ("a100-80gb", "llama-3.1-8b", "a100_meta-llama_Meta-Llama-3-8B"),
    ("h100", "llama-2-7b", "h100_meta-llama_Llama-2-7b-hf"),
]
#: Qwen3-32B on H200 as AIConfigurator 0.12 predicts it from its kernel database: milliseconds of a prompt of
#: 4,000, and of a decode step of 64 rows with 4,250 tokens each, by TP.
KERNEL_DATABASE = {1: (393.0, 36.8), 2: (216.9, 20.1), 4: (127.0, 12.2)}


def code_efficiencies() -> dict[str, float]:
    """What `Efficiencies::default()` says."""
    source = (LATENCY / "roofline.rs").read_text()
    block = source.split("impl Default for Efficiencies", 1)[1].split("\n}\n", 1)[0]
    return {name: float(value) for name, value in re.findall(r"(\w+): ([\d.e-]+),", block)}


def gpu(name: str) -> dict[str, float]:
    """Peak operations, and bytes per second of memory and NVLink, from the code's table."""
    row = re.search(rf'Row {{ name: "{name}".*', (LATENCY / "hardware.rs").read_text())
    if row is None:
        raise KeyError(f"no row {name!r} in {LATENCY / 'hardware.rs'}")
    figures = dict(re.findall(r"(bf16|hbm|nvlink): (?:Some\()?([\d.]+)", row[0]))
    return {
        "flops": float(figures["bf16"]) * 1e12,
        "memory": float(figures["hbm"]) * 1e12,
        "link": float(figures["nvlink"]) * 1e9,
    }


def step_seconds(
    shape: Shape,
    on: dict[str, float],
    tp: int,
    share: dict[str, float],
    prompt: int = 0,
    rows: int = 0,
    context: int = 0,
) -> float:
    """A step of one whole prompt or of `rows` decodes with `context` tokens together: the formulas of
    `roofline.rs`, for dense bf16 models. A test compares the two."""
    tokens = prompt + rows

    def part(computed: float, read: float) -> float:
        flops = 2 * computed / tp / (on["flops"] * share["linear_flops"])
        return max(flops, BF16 * read / tp / (on["memory"] * share["weight_bandwidth"]))

    layers, head = shape.layers * shape.layer_params, shape.vocab * shape.hidden
    seconds = share["step_constant"] + shape.layers * share.get("layer_latency", 0.0)
    seconds += part(tokens * layers, layers) + part((rows or 1) * head, head)
    pairs = prompt**2 + 2 * context
    attention = attention_flops(shape) * pairs / tp / (on["flops"] * share["attention_flops"])
    moved = kv_bytes(shape) * (prompt + context) + 4 * BF16 * shape.layers * shape.heads * 64 * tokens
    seconds += max(attention, moved / tp / (on["memory"] * share["kv_bandwidth"]))
    if tp > 1:
        reduced = 2 * (tp - 1) / tp * BF16 * shape.hidden * tokens / (on["link"] * share["link_bandwidth"])
        seconds += 2 * shape.layers * (share["all_reduce_latency"] + reduced)
    return seconds


def attention_flops(shape: Shape) -> float:
    """Operations of causal attention per square of a prompt's length."""
    return shape.layers * shape.heads * 256


def kv_bytes(shape: Shape) -> float:
    """Bytes of KV per token."""
    return 2 * BF16 * shape.layers * shape.kv_heads * 128


# --- Linear layers


def linear_kernels() -> pd.DataFrame:
    """The four linear kernels of a layer, medians, in seconds, with a weight that makes each power of two of
    the tokens count alike in each (GPU, model, TP): the sizes measured lie densest where they are small.

    Norms, rotary embeddings, activations and additions are separate kernels there, which engines fuse; they
    are not in the roofline and not in here."""
    frames = []
    for on, model, name in KERNELS:
        rows = pd.read_csv(MEASURED / f"vidur/{name}_mlp.csv")
        kernels = ["attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"]
        tp = rows["num_tensor_parallel_workers"]
        params, peaks = SHAPES[model].layer_params / tp, gpu(on)
        frames.append(
            pd.DataFrame(
                {
                    "gpu": on,
                    "model": model,
                    "tp": tp,
                    "tokens": rows["num_tokens"],
                    "seconds": rows[[f"time_stats.{kernel}.median" for kernel in kernels]].sum(axis=1) * 1e-3,
                    "flops_bound": 2 * rows["num_tokens"] * params / peaks["flops"],
                    "bytes_bound": BF16 * params / peaks["memory"],
                }
            )
        )
    found = pd.concat(frames, ignore_index=True)
    octave = np.floor(np.log2(found["tokens"]))
    sizes = found.groupby(["gpu", "model", "tp", octave])["tokens"].transform("size")
    return found.assign(weight=1.0 / sizes)


def linear_seconds(kernels: pd.DataFrame, flops: float, bandwidth: float, layer: float = 0.0) -> np.ndarray:
    """The roofline of a layer's linear kernels, with `layer` seconds on top."""
    bound = np.maximum(kernels["flops_bound"] / flops, kernels["bytes_bound"] / bandwidth)
    return bound.to_numpy() + layer


def fit_linear(
    kernels: pd.DataFrame, layer_latencies: Sequence[float] = (0.0,)
) -> tuple[float, float, float]:
    """Shares of peak operations and of bandwidth, and seconds a layer out of `layer_latencies`: the best of a
    grid of 0.05, and around it of 0.01."""
    logs, weight = np.log(kernels["seconds"].to_numpy()), kernels["weight"].to_numpy()

    def error(point: tuple[float, float, float]) -> float:
        return float(np.average(np.abs(np.log(linear_seconds(kernels, *point)) - logs), weights=weight))

    coarse = np.arange(0.30, 1.0001, 0.05)
    flops, bandwidth, layer = min(product(coarse, coarse, layer_latencies), key=error)
    fine = np.arange(-0.05, 0.0501, 0.01)
    return min(product(flops + fine, bandwidth + fine, (layer,)), key=error)


def relative_errors(
    ours: np.ndarray, measured: np.ndarray, weight: np.ndarray | None = None
) -> dict[str, float]:
    """Mean and median size of the relative errors, and the largest with its sign."""
    errors = np.asarray(ours) / np.asarray(measured) - 1.0
    return {
        "mean": float(np.average(np.abs(errors), weights=weight)),
        "median": float(np.median(np.abs(errors))),
        "worst": float(errors[np.argmax(np.abs(errors))]),
    }


def linear_layers() -> pd.DataFrame:
    """Per GPU and model on one GPU of its own and over all TPs: fitted, and the errors of both."""
    kernels, code = linear_kernels(), code_efficiencies()
    parts = [
        ((*key, which), rows if which == "1 to 8" else rows[rows["tp"] == 1])
        for key, rows in kernels.groupby(["gpu", "model"])
        for which in ("1", "1 to 8")
    ]
    parts += [(("all", "all", "1"), kernels[kernels["tp"] == 1]), (("all", "all", "1 to 8"), kernels)]
    rows = {}
    for key, part in parts:
        flops, bandwidth, _ = fit_linear(part)
        rows[key] = {"flops": flops, "bandwidth": bandwidth}
        pairs = {"fitted": (flops, bandwidth), "code": (code["linear_flops"], code["weight_bandwidth"])}
        for name, pair in pairs.items():
            errors = relative_errors(linear_seconds(part, *pair), part["seconds"], part["weight"])
            rows[key] |= {f"{name} {what}": error for what, error in errors.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["gpu", "model", "tp"])


# --- Attention


def sarathi_prompts() -> pd.DataFrame:
    """Seconds of whole prompts of Yi-34B on two A100 (microsoft/sarathi-serve, osdi-experiments, Apache-2.0),
    figures 2 and 9. The first batch, of 256 tokens, was cold and is left out."""
    folder = MEASURED / "sarathi_osdi"
    alone = pd.read_csv(folder / "figure-2_prefill.csv")
    alone = alone[alone["Batch Id"] > 0]
    whole = pd.read_csv(folder / "figure-9_chunking-overhead.csv")
    whole = whole[whole["chunk_size"] > whole["prefill_length"]]
    return pd.DataFrame(
        {
            "tokens": [*alone["batch_num_prefill_tokens"], *whole["prefill_length"]],
            "seconds": [*alone["batch_execution_time"], *(whole["prefill_execution_time"] * 1e-3)],
        },
        dtype=float,
    )


def square_coefficient(prompts: pd.DataFrame) -> float:
    """Seconds per square of the tokens, of a + b · tokens + c · tokens², by relative least squares."""
    tokens, seconds = prompts["tokens"].to_numpy(), prompts["seconds"].to_numpy()
    columns = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1) / seconds[:, None]
    return float(np.linalg.lstsq(columns, np.ones_like(tokens), rcond=None)[0][2])


def attention() -> pd.DataFrame:
    """What each source implies: the share of peak operations by the quadratic part of its prompts, and that
    part's share of a prompt of 2,048; the share of bandwidth by its decode step's time per token of context.

    DistServe (LLMServe/DistServe, simdistserve, Apache-2.0): fitted coefficients of two engines, batches below
    95. Sarathi publishes no contexts of decodes. One coefficient below zero (vLLM, OPT-66B, TP 2) means
    nothing and is missing."""
    peaks, rows = gpu("a100-80gb"), {}
    for engine in ("distserve", "vllm"):
        profile = json.loads((MEASURED / f"distserve/profiler-a100-80g.{engine}.json").read_text())
        for model, by_tp in profile.items():
            shape = SHAPES[model.removeprefix("facebook/")]
            for tp, terms in by_tp.items():
                constant, linear, square = np.array(terms["prefill"]) * 1e-3
                context = terms["decoding_smallbs"][1] * 1e-3
                rows[engine, f"{model.removeprefix('facebook/')} TP {tp}"] = {
                    "flops": implied(attention_flops(shape) / int(tp) / peaks["flops"], square),
                    "of_2048": square * 2048**2 / (constant + linear * 2048 + square * 2048**2),
                    "bandwidth": implied(kv_bytes(shape) / int(tp) / peaks["memory"], context),
                }
    prompts = sarathi_prompts()
    square = square_coefficient(prompts)
    at_2048 = prompts.loc[prompts["tokens"].sub(2048).abs() < 2, "seconds"].mean()
    rows["sarathi", "yi-34b TP 2"] = {
        "flops": implied(attention_flops(SHAPES["yi-34b"]) / 2 / peaks["flops"], square),
        "of_2048": square * 2048**2 / at_2048,
        "bandwidth": np.nan,
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["source", "model"])


def implied(at_peak: float, seconds: float) -> float:
    """The efficiency at which what takes `at_peak` at best takes `seconds`; missing where they are not above 0."""
    return at_peak / seconds if seconds > 0.0 else np.nan


# --- All-reduce


def all_reduces() -> pd.DataFrame:
    """Share of the link that all-reduces of 4 MiB and more reach beside the code's latency, within one host
    (microsoft/vidur, MIT): by GPU and number of ranks. Smaller ones are bound by latencies of 7 to 60 µs, in
    two modes that the files mix."""
    rows, latency = {}, code_efficiencies()["all_reduce_latency"]
    for on, name in (("a100-80gb", "a100"), ("h100", "h100")):
        times = pd.read_csv(MEASURED / f"vidur/net_{name}_dgx_all_reduce.csv")
        large = times[(times["devices_per_node"] == times["num_workers"]) & (times["size"] >= 2**22)]
        for ranks, part in large.groupby("num_workers"):
            wire = 2 * (ranks - 1) / ranks * part["size"] / gpu(on)["link"]
            seconds = part["time_stats.all_reduce.median"] * 1e-3
            share = float((wire / (seconds - latency)).median())
            code = latency + wire / code_efficiencies()["link_bandwidth"]
            rows[on, ranks] = {
                "link": share,
                **{
                    f"fitted {what}": e
                    for what, e in relative_errors(latency + wire / share, seconds).items()
                },
                **{f"code {what}": e for what, e in relative_errors(code, seconds).items()},
            }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["gpu", "ranks"])


# --- All of it


def candidates() -> pd.DataFrame:
    """Sets of efficiencies: the code's; what the measurements give (linear layers from single GPUs, medians of
    the rest); and linear layers over all TPs with a constant a layer, which the code does not have."""
    code, kernels = code_efficiencies(), linear_kernels()
    implied_by = attention()
    flops, bandwidth, _ = fit_linear(kernels[kernels["tp"] == 1])
    fitted = code | {
        "linear_flops": flops,
        "weight_bandwidth": bandwidth,
        "attention_flops": float(implied_by["flops"].median()),
        "kv_bandwidth": float(implied_by["bandwidth"].median()),
        "link_bandwidth": float(all_reduces()["link"].median()),
    }
    flops, bandwidth, layer = fit_linear(kernels, np.arange(0.0, 41e-6, 4e-6))
    constant = code | {"linear_flops": flops, "weight_bandwidth": bandwidth, "layer_latency": layer}
    named = {"code": code, "fitted": fitted, "code, a constant a layer": constant}
    table = pd.DataFrame.from_dict(named, orient="index").fillna({"layer_latency": 0.0})
    errors = {}
    for name, share in table.iterrows():
        linear = (share["linear_flops"], share["weight_bandwidth"], share["layer_latency"])
        ours = linear_seconds(kernels, *linear)
        errors[name] = {
            "linear layers": relative_errors(ours, kernels["seconds"], kernels["weight"])["mean"],
            "H200 steps": relative_errors(*database_steps(dict(share)).T)["mean"],
        }
    return table.join(pd.DataFrame.from_dict(errors, orient="index"))


def database_steps(share: dict[str, float]) -> np.ndarray:
    """Rows of (ours, AIConfigurator's) seconds for the steps of `KERNEL_DATABASE`."""
    shape, peaks, rows = SHAPES["qwen3-32b"], gpu("h200"), []
    for tp, (prefill, decode) in KERNEL_DATABASE.items():
        rows.append((step_seconds(shape, peaks, tp, share, prompt=4000), prefill * 1e-3))
        rows.append((step_seconds(shape, peaks, tp, share, rows=64, context=64 * 4250), decode * 1e-3))
    return np.array(rows)


def main() -> None:
    """Prints every table."""
    code = code_efficiencies()
    print(f"The code's (rust/core/src/latency/roofline.rs): {code}\n")
    parts = [
        (
            "Linear layers, Vidur's kernels: shares of peak, and relative errors of a layer's time",
            linear_layers(),
        ),
        ("Attention: shares of peak that published prompts and decode steps imply", attention()),
        ("  their medians", attention().groupby(level="source", sort=False).median()),
        ("All-reduces of 4 MiB and more, Vidur's: share of NVLink, and relative errors", all_reduces()),
        (
            "Whole sets: mean relative error of the linear layers over all TPs, and of steps that none was "
            "fitted on (Qwen3-32B on H200, AIConfigurator's kernel database)",
            candidates().T,
        ),
    ]
    with pd.option_context("display.float_format", "{:.4g}".format):
        for title, table in parts:
            print(f"{title}\n{table.to_string()}\n", flush=True)


if __name__ == "__main__":
    main()
