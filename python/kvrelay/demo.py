"""The demo: a real model with prefill and decode apart, policies measured on it, the published example
simulated, one picture.

Run it as ``kvrelay demo``. What it prints is a result; its progress goes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from kvrelay import plot
from kvrelay.cluster import Cluster
from kvrelay.describe import SLO
from kvrelay.engine import Engine
from kvrelay.errors import ConfigError
from kvrelay.formats import percent
from kvrelay.result import Result
from kvrelay.search import MaxGoodput, max_goodput
from kvrelay.workload import Workload

MODEL = "smollm2-135m"
QUESTION = "Why do large language models keep a KV cache? Answer in two sentences."
#: Lengths of the workload are the published ones divided by this: a small model on a small machine.
DIVIDE = 8
NUM_REQUESTS = 48
#: Unloaded latencies before and after that differ by more than this factor say that something else ran.
NOISY = 1.3
#: Share of the capacity of ``2M`` at which the policies are compared.
LOAD = 0.7
#: Objectives by class, in multiples of the unloaded TTFT and TPOT.
CLASSES = {"tight": (5.0, 2.0), "loose": (15.0, 4.0)}
COMPARED = (("2M", "fcfs"), ("2M", "chunked"), ("1P1D", "disaggregated"), ("1P1D", "goodput"))


def main(output: str | Path = "demo.png", *, progress: bool = True) -> None:
    """The whole demo; saves its picture at ``output``."""
    folder = Path(output).absolute().parent
    if not folder.is_dir():
        raise ConfigError(
            f"the picture cannot be saved at {str(output)!r}: there is no folder {str(folder)!r}"
        )
    known = plot.file_types()
    if Path(output).is_dir() or Path(output).suffix.lstrip(".").lower() not in known:
        raise ConfigError(
            f"the picture cannot be saved at {str(output)!r}: give a file that ends in one of {', '.join(known)}"
        )
    started = time.monotonic()
    stream_an_answer()
    measured = compare_policies(progress=progress)
    simulated = simulate_the_example(progress=progress)
    save_picture(measured, simulated, output)
    print(f"\nPicture: {output}   ({time.monotonic() - started:.0f} s in all)")


def stream_an_answer() -> None:
    """(a) A streamed answer, its prompt computed on one worker and its tokens on another."""
    with Engine(MODEL, topology="1P1D") as engine:
        _heading("A real model, prefill on one worker and decode on the other")
        print(f"> {QUESTION}\n")
        stream = engine.stream(engine.chat_ids(QUESTION), max_tokens=80)
        for piece in stream:
            print(piece, end="", flush=True)
        row = stream.output.record
    print(
        f"\n\n{row['prompt_tokens']} prompt tokens on worker {row['prefill_worker']}, {row['output_tokens']} tokens from "
        f"worker {row['decode_worker']}: TTFT {_ms(row['ttft'])}, KV transfer "
        f"{_ms(row['transfer_end'] - row['transfer_start'])}, TPOT {_ms(row['tpot'])}"
    )


def compare_policies(*, progress: bool = True) -> dict[str, Result]:
    """(b) The same requests through four topologies and policies, on the real engine."""
    lengths = Workload.preset("azure-conv-2023", num_requests=NUM_REQUESTS).scaled_lengths(DIVIDE)
    engines = {topology: Engine(MODEL, topology=topology) for topology in dict(COMPARED)}
    try:
        ttft, tpot = unloaded_latency(engines["2M"], lengths)
        capacity = measured_capacity(engines["2M"], lengths, progress=progress)
        workload = demo_workload(ttft, tpot, LOAD * capacity)
        results = {}
        for topology, policy in COMPARED:
            _warm(engines[topology])
            results[f"{topology} {policy}"] = engines[topology].run(workload, policy, progress=progress)
        later, _ = unloaded_latency(engines["2M"], lengths)
    finally:
        for engine in engines.values():
            engine.close()
    _heading(f"{NUM_REQUESTS} requests of azure-conv-2023 (lengths / {DIVIDE}) on the real engine")
    print(
        f"unloaded: TTFT {_ms(ttft)}, TPOT {_ms(tpot)}; capacity of 2M {capacity:.2f} req/s; offered {LOAD * capacity:.2f} req/s"
    )
    for name, slo in workload.classes.items():
        print(f"class {name}: TTFT within {_ms(slo.ttft)}, TPOT within {_ms(slo.tpot)}")
    print()
    print(comparison(results).to_string(index=False))
    best = max(results, key=lambda label: results[label].goodput())
    print(f"most goodput: {best} (one run each)")
    if not 1 / NOISY <= later / ttft <= NOISY:
        print(
            f"This machine was not at rest: the unloaded TTFT was {_ms(ttft)} before these runs and {_ms(later)} after "
            "them. Do not trust the ranking."
        )
    return results


def unloaded_latency(engine: Engine, lengths: Workload) -> tuple[float, float]:
    """Median TTFT and TPOT of requests of mean length that are alone, in seconds."""
    frame = lengths.to_frame()
    prompt, output = int(frame["prompt_tokens"].mean()), int(frame["output_tokens"].mean())
    # So far apart that each is alone; the first also warms the engine up.
    alone = Workload.fixed(rate=0.25, num_requests=4, prompt_tokens=prompt, output_tokens=output)
    requests = engine.run(alone, "fcfs", progress=False).requests.iloc[1:]
    return float(requests["ttft"].median()), float(requests["tpot"].median())


def measured_capacity(engine: Engine, lengths: Workload, *, progress: bool = True) -> float:
    """Requests per second when all of them are there at once."""
    burst = lengths.at_rate(1000.0)
    return len(burst) / engine.run(burst, "fcfs", progress=progress).makespan


def demo_workload(ttft: float, tpot: float, rate: float) -> Workload:
    """Half of the requests in each class, merged, at ``rate`` requests per second."""
    parts = [
        Workload.preset(
            "azure-conv-2023",
            num_requests=NUM_REQUESTS // len(CLASSES),
            slo=SLO(ttft=times_ttft * ttft, tpot=times_tpot * tpot),
            slo_class=name,
            seed=seed,
        )
        for seed, (name, (times_ttft, times_tpot)) in enumerate(CLASSES.items())
    ]
    return Workload.merge(*parts).scaled_lengths(DIVIDE).at_rate(rate)


def comparison(results: dict[str, Result]) -> pd.DataFrame:
    """One row a run: latencies in milliseconds, attainment, goodput."""
    rows = []
    for label, result in results.items():
        topology, policy = label.split(" ", 1)
        row = {"topology": topology, "policy": policy}
        for metric in ("ttft", "tpot"):
            for rank in (50, 90):
                value = result.percentile(metric, rank)
                row[f"{metric.upper()} p{rank} ms"] = "-" if value is None else f"{value * 1e3:.0f}"
        row |= {f"{name} good": percent(result.attainment(name) or 0.0) for name in CLASSES}
        row["attainment"] = percent(result.attainment() or 0.0)
        row["goodput req/s"] = f"{result.goodput():.2f}"
        rows.append(row)
    return pd.DataFrame(rows)


def simulate_the_example(*, progress: bool = True) -> dict[str, MaxGoodput]:
    """(c) The example that the case for disaggregation was published with, simulated."""
    slo = SLO(ttft=0.4, tpot=0.04)
    workload = Workload.poisson(rate=2.0, num_requests=2000, prompt_tokens=512, output_tokens=64, slo=slo)
    found = {}
    for topology, policy in (("1M", "fcfs"), ("2P1D", "disaggregated")):
        cluster = Cluster(topology, model="opt-13b", gpu="a100-80gb", latency="vllm")
        found[topology] = max_goodput(
            workload, cluster, policy, criterion=p90_criterion(slo), progress=progress
        )
    ratio = found["2P1D"].per_gpu / found["1M"].per_gpu
    _heading("Simulated: 13B on A100-80GB, 512 tokens in, 64 out, P90 TTFT 0.4 s, P90 TPOT 0.04 s")
    for topology, best in found.items():
        print(f"{topology:5} {best.rate:5.2f} req/s = {best.per_gpu:.2f} per GPU")
    print(f"2P1D serves {ratio:.1f} times as much per GPU as 1M (published: 2.1)")
    return found


def p90_criterion(slo: SLO) -> Callable[[Result], float]:
    """The published criterion: the smaller of the shares within the TTFT and within the TPOT objective."""

    def smaller_share(result: Result) -> float:
        requests = result.requests
        return min(float((requests["ttft"] <= slo.ttft).mean()), float((requests["tpot"] <= slo.tpot).mean()))

    return smaller_share


def save_picture(measured: dict[str, Result], simulated: dict[str, MaxGoodput], output: str | Path) -> None:
    """(d) Latency CDFs and goodput bars in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11.0, 8.0), layout="constrained")
    for ax, metric in zip(axes[0], ("ttft", "tpot"), strict=True):
        plot.latency_cdf(measured, ax=ax, metric=metric)
    plot.goodput_bars({label.replace(" ", "\n"): result for label, result in measured.items()}, ax=axes[1][0])
    axes[1][0].set_title("Measured: goodput and attainment")
    rates = [best.per_gpu for best in simulated.values()]
    bars = axes[1][1].bar(range(len(rates)), rates, width=0.5, color=["#7f7f7f", "#0072b2"])
    axes[1][1].set_xticks(range(len(rates)), list(simulated))
    axes[1][1].bar_label(bars, [f"{rate:.2f}" for rate in rates])
    axes[1][1].set_ylabel("max goodput (req/s per GPU)")
    axes[1][1].set_title("Simulated: 13B on A100-80GB")
    axes[1][1].margins(y=0.15)
    figure.suptitle(
        f"{MODEL} on this machine's CPU: {NUM_REQUESTS} requests at {LOAD:.0%} of the capacity of 2M"
    )
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def _warm(engine: Engine) -> None:
    engine.generate(list(range(100, 164)), max_tokens=4, ignore_eos=True)


def _heading(text: str) -> None:
    sys.stderr.flush()
    print(f"\n== {text}", flush=True)


def _ms(seconds: float) -> str:
    return f"{float(seconds) * 1e3:.0f} ms"


__all__ = ["comparison", "main"]
