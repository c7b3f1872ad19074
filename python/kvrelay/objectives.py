"""Published service-level objectives, as numbers with their sources.

Only limits on time to first token, on the mean time per output token and on the whole time of a
request: objectives on tails of single gaps (Sarathi-Serve's P99 of the time between tokens, Mooncake's
mean of the worst tenth) are other quantities, and are left out.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """Limits in seconds; ``share`` is the part of requests that its source asks to meet them."""

    ttft: float
    tpot: float
    share: float
    source: str


_DISTSERVE = "DistServe (Zhong et al., OSDI'24), table 1: {}"
_MLPERF = "MLPerf Inference, server, loadgen/mlperf.conf of mlcommons/inference: {}"


def _distserve(ttft: float, tpot: float, what: str) -> Published:
    return Published(ttft, tpot, 0.9, _DISTSERVE.format(what))


def _mlperf(ttft_ms: float, tpot_ms: float, since: str) -> Published:
    return Published(ttft_ms / 1000, tpot_ms / 1000, 0.99, _MLPERF.format(since))


#: By name. DistServe's table has two printings: these are the figures of the OSDI one.
PUBLISHED: dict[str, Published] = {
    "chat": _distserve(0.25, 0.1, "chatbot, OPT-13B, ShareGPT"),
    "chat-opt-66b": _distserve(2.5, 0.15, "chatbot, OPT-66B, ShareGPT (0.4 s and 0.1 s on arXiv)"),
    "chat-opt-175b": _distserve(4.0, 0.2, "chatbot, OPT-175B, ShareGPT"),
    "code": _distserve(0.125, 0.2, "code completion, OPT-66B, HumanEval"),
    "summarization": _distserve(15.0, 0.15, "summarization, OPT-66B, LongBench"),
    "distserve-blog": Published(
        0.4, 0.04, 0.9, "Hao AI Lab, Throughput is Not All You Need (2024): 13B, input 512, output 64"
    ),
    "mlperf-llama2-70b": _mlperf(2000, 200, "v5.0 on"),
    "mlperf-llama2-70b-interactive": _mlperf(450, 40, "v5.1 on"),
    "mlperf-mixtral-8x7b": _mlperf(2000, 200, "v5.0 on"),
    "mlperf-llama3.1-405b": _mlperf(6000, 175, "v5.0 on"),
    "mlperf-llama3.1-405b-interactive": _mlperf(4500, 80, "v6.0 on"),
    "mlperf-llama3.1-8b": _mlperf(2000, 100, "v5.1 on"),
    "mlperf-llama3.1-8b-interactive": _mlperf(500, 30, "v6.0 on"),
    "mlperf-deepseek-r1": _mlperf(2000, 80, "v5.1 on"),
    "mlperf-deepseek-r1-interactive": _mlperf(1500, 15, "v6.0 on"),
    "mlperf-gpt-oss-120b": _mlperf(3000, 80, "after v6.0"),
    "mlperf-gpt-oss-120b-interactive": _mlperf(
        2000, 15, "after v6.0; inference_rules.adoc of mlcommons/inference_policies has 20 ms per token"
    ),
}
