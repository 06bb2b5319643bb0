"""The server's numbers for Prometheus: vLLM's names under the prefix `shardline:`.

    metrics = Metrics("my-model")
    metrics.observe_step(schedule, outputs)        # once a step, on the engine's thread
    metrics.render()                               # the text of /metrics

They live on a registry of their own, so that two servers in one process don't meet.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shardline.serving.requests import FinishReason, RequestOutput
from shardline.serving.scheduler import Schedule

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """All series carry the label `model_name`. Counting happens on the engine's thread, reading on any."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}

        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self._cache_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._preemptions = self._counter("num_preemptions", "Requests that gave their blocks back to wait again.")
        self._iteration_tokens = self._histogram("iteration_tokens_total", "Tokens computed in one step.", _TOKENS)
        self._ttft = self._seconds("time_to_first_token_seconds", "Arrival to first token.")
        self._inter_token = self._seconds("inter_token_latency_seconds", "One token to the next of the same request.")
        self._e2e = self._seconds("e2e_request_latency_seconds", "Arrival to last token.")
        self._queue = self._seconds("request_queue_time_seconds", "Arrival to the start of the first step it is in.")
        self._prefill = self._seconds("request_prefill_time_seconds", "First step to first token.")
        self._decode = self._seconds("request_decode_time_seconds", "First token to last token.")
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._request_output = self._histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        success = Counter(
            "shardline:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {
            reason: success.labels(**self._labels, finished_reason=reason.value) for reason in FinishReason
        }

    def watch_queues(
        self, *, running: Callable[[], float], waiting: Callable[[], float], cache_usage: Callable[[], float]
    ) -> None:
        """Reads the gauges from these functions whenever they are asked for."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._cache_usage.set_function(cache_usage)

    def observe_step(self, schedule: Schedule, outputs: list[RequestOutput]) -> None:
        """Counts one step."""
        self._iteration_tokens.observe(schedule.num_tokens)
        self._preemptions.inc(len(schedule.preempted))
        self._prompt_tokens.inc(
            sum(
                max(0, min(chunk.num_tokens, chunk.sequence.num_prompt_tokens - chunk.start))
                for chunk in schedule.chunks
            )
        )
        self._generation_tokens.inc(sum(len(output.token_ids) for output in outputs))
        for output in outputs:
            self._observe_output(output)

    def observe_abort(self) -> None:
        """Counts a request whose client went away."""
        self._finished[FinishReason.ABORT].inc()

    def render(self) -> bytes:
        """Returns the registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def _observe_output(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self._finished[output.finish_reason].inc()
        times = output.timeline
        if times is None:
            return
        if times.first_token_s is None or times.last_token_s is None or times.scheduled_s is None:
            return
        if times.gap_s is None:
            self._ttft.observe(times.first_token_s - times.arrived_s)
        else:
            self._inter_token.observe(times.gap_s)
        if output.finished:
            self._e2e.observe(times.last_token_s - times.arrived_s)
            self._queue.observe(times.scheduled_s - times.arrived_s)
            self._prefill.observe(times.first_token_s - times.scheduled_s)
            self._decode.observe(times.last_token_s - times.first_token_s)
            self._request_prompt.observe(output.num_prompt_tokens)
            self._request_output.observe(output.num_output_tokens)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"shardline:{name}", text, ["model_name"], registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"shardline:{name}", text, ["model_name"], registry=self.registry).labels(**self._labels)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, _SECONDS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"shardline:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(**self._labels)
