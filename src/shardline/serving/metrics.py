"""The server's numbers for Prometheus: vLLM's names under the prefix `shardline:`.

    metrics = Metrics("my-model")
    metrics.watch_engine(engine, ...)              # gauges and the engine's own counters are read when asked for
    metrics.observe_step(schedule, outputs)        # once a step, on the engine's thread
    metrics.render()                               # the text of /metrics

They live on a registry of their own, so that two servers in one process don't meet. `dashboard` draws them for Grafana.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shardline.serving.requests import FinishReason, RequestOutput
from shardline.serving.scheduler import Schedule

if TYPE_CHECKING:
    from shardline.serving.engine import Engine

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """All series carry the label `model_name`. Counting happens on the engine's thread, reading on any."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}

        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self._cache_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        self._asleep = self._gauge("engine_sleep_state", "1 while the server sleeps, else 0.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._preemptions = self._counter("num_preemptions", "Requests that gave their blocks back to wait again.")
        self._rejections = self._counter("admission_rejections", "Requests refused with 429: the queue was full.")
        self._corrupted = self._counter("corrupted_requests", "Requests whose logits were not finite.")
        self._reloads = self._counter("weight_reloads", "Times that the weights were replaced.")
        self._iteration_tokens = self._histogram("iteration_tokens_total", "Tokens computed in one step.", _TOKENS)
        self._ttft = self._seconds("time_to_first_token_seconds", "Arrival to first token.")
        self._inter_token = self._seconds("inter_token_latency_seconds", "One token to the next of the same request.")
        self._per_token = self._seconds(
            "request_time_per_output_token_seconds", "A request's mean time from one token to the next."
        )
        self._e2e = self._seconds("e2e_request_latency_seconds", "Arrival to last token.")
        self._queue = self._seconds("request_queue_time_seconds", "Arrival to the start of the first step it is in.")
        self._prefill = self._seconds("request_prefill_time_seconds", "First step to first token.")
        self._decode = self._seconds("request_decode_time_seconds", "First token to last token.")
        self._inference = self._seconds("request_inference_time_seconds", "First step to last token.")
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._request_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", _TOKENS
        )
        self._request_output = self._histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._params_n = self._histogram("request_params_n", "Replies that a request asked for.", _CHOICES)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "Longest reply asked for.", _TOKENS)
        self._cache_config = Gauge(
            "shardline:cache_config_info",
            "The KV cache, in its labels.",
            ["model_name", "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"],
            registry=self.registry,
        )
        success = Counter(
            "shardline:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {
            reason: success.labels(**self._labels, finished_reason=reason.value) for reason in FinishReason
        }
        self._engine_counters = _EngineCounters(model_name)
        self.registry.register(self._engine_counters)

    def watch_engine(self, engine: Engine, *, num_waiting: Callable[[], float], asleep: Callable[[], float]) -> None:
        """Reads the gauges and the engine's own counters from it whenever they are asked for."""
        self._running.set_function(lambda: len(engine.scheduler.running))
        self._waiting.set_function(num_waiting)
        self._cache_usage.set_function(lambda: engine.blocks.usage)
        self._asleep.set_function(asleep)
        self._engine_counters.engine = engine
        self._cache_config.labels(
            **self._labels,
            block_size=engine.config.block_size,
            num_gpu_blocks=engine.blocks.num_blocks,
            cache_dtype=engine.config.dtype,
            enable_prefix_caching=engine.config.enable_prefix_caching,
        ).set(1)

    def observe_params(self, *, num_choices: int, max_tokens: int | None) -> None:
        """Notes what a client asked for."""
        self._params_n.observe(num_choices)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

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

    def observe_rejection(self) -> None:
        """Counts a request that found the queue full."""
        self._rejections.inc()

    def observe_reload(self) -> None:
        """Counts a change of weights."""
        self._reloads.inc()

    def render(self) -> bytes:
        """Returns the registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def _observe_output(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self._finished[output.finish_reason].inc()
            if output.finish_reason is FinishReason.ERROR and "finite" in (output.error or ""):
                self._corrupted.inc()
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
            decode_s = times.last_token_s - times.first_token_s
            self._e2e.observe(times.last_token_s - times.arrived_s)
            self._queue.observe(times.scheduled_s - times.arrived_s)
            self._prefill.observe(times.first_token_s - times.scheduled_s)
            self._decode.observe(decode_s)
            self._inference.observe(times.last_token_s - times.scheduled_s)
            if output.num_output_tokens > 1:
                self._per_token.observe(decode_s / (output.num_output_tokens - 1))
            self._request_prompt.observe(output.num_prompt_tokens)
            self._request_computed.observe(output.num_prompt_tokens - output.num_cached_tokens)
            self._cached_tokens.inc(output.num_cached_tokens)
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


class _EngineCounters(Collector):
    """What the engine keeps itself: nothing is done per step for it."""

    _READ: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
        ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda e: e.scheduler.num_queried_tokens),
        ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda e: e.scheduler.num_hit_tokens),
        ("spec_decode_num_drafts", "Times that tokens were guessed.", lambda e: e.num_drafts),
        ("spec_decode_num_draft_tokens", "Tokens guessed.", lambda e: e.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Guessed tokens that were right.", lambda e: e.num_accepted_tokens),
    )

    def __init__(self, model_name: str) -> None:
        self.engine: Engine | None = None
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        for name, text, read in self._READ:
            family = CounterMetricFamily(f"shardline:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], 0 if self.engine is None else read(self.engine))
            yield family
        yield self._adapters()

    def _adapters(self) -> Metric:
        """Returns 1 with the LoRA adapters in its labels, as vLLM does."""
        labels = ["model_name", "running_lora_adapters", "waiting_lora_adapters", "max_lora"]
        family = GaugeMetricFamily(
            "shardline:lora_requests_info", "LoRA adapters in use, in its labels.", labels=labels
        )
        if self.engine is not None and self.engine.adapters is not None:
            scheduler = self.engine.scheduler
            used = [
                ",".join(sorted({each.request.adapter for each in list(queue) if each.request.adapter is not None}))
                for queue in (scheduler.running, scheduler.waiting)
            ]
            family.add_metric([self._model_name, *used, str(len(self.engine.adapters.names))], 1)
        return family
