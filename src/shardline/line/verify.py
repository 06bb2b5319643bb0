"""Do the trainer, transformers and the serving engine compute the same? Measured on real text, in fp32.

    report = verify(folder, documents=heldout_documents(folder, num_tokens=1024))
    report.hf_max_abs_logit, report.train_serve_max_abs_logprob

The trainer's side is the decoder over packed rows, several documents a row, as in training. transformers gets each
document alone. The engine scores the documents as prompts in small chunks, then continues some of them, so that
prefill, chunked prefill, mixed batches and decode through the paged cache are all in the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shardline.checkpoints.huggingface import load_decoder, read_config
from shardline.checkpoints.native import find_model_folder
from shardline.config import DataConfig, ShardlineError, UsageError, load_config
from shardline.config.cache import cache_dir
from shardline.kernels import batch_invariant
from shardline.models.attention import DenseAttention
from shardline.models.decoder import Decoder
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.requests import Request, SamplingParams
from shardline.text.dataset import prepare_dataset
from shardline.text.tokenizer import Tokenizer
from shardline.training.loss import document_lengths

__all__ = ["HF_TOLERANCE", "SERVE_TOLERANCE", "Agreement", "Worst", "heldout_documents", "verify"]

HF_TOLERANCE = 1e-3
"""Largest difference of a logit from transformers' (fp32)."""

SERVE_TOLERANCE = 1e-4
"""Largest difference of a served log-probability from the trainer's, in nats (fp32)."""

_NUM_CONTINUED = 4
_NUM_NEW_TOKENS = 8
_CHUNK_TOKENS = 96  # small and no multiple of the block size, so that prompts are split in odd places


@dataclass(frozen=True, kw_only=True)
class Worst:
    """Where the train-serve difference is largest: document, place of the token in it, both log-probabilities."""

    document: int
    position: int
    token_id: int
    trainer_logprob: float
    served_logprob: float
    stage: str


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences in fp32: of logits at every position, of log-probabilities at every token that has a prefix."""

    hf_max_abs_logit: float
    hf_argmax_agreement: float
    train_serve_max_abs_logprob: float
    train_serve_mean_abs_logprob: float
    num_tokens: int
    worst: Worst
    batch_invariant: bool = False

    @property
    def serve_tolerance(self) -> float:
        """In batch-invariant mode the two must be equal."""
        return 0.0 if self.batch_invariant else SERVE_TOLERANCE

    @property
    def agrees(self) -> bool:
        """Whether both are within tolerance; NaN is not."""
        return self.hf_max_abs_logit <= HF_TOLERANCE and self.train_serve_max_abs_logprob <= self.serve_tolerance


def heldout_documents(path: str | Path, *, num_tokens: int, text: Path | None = None) -> list[list[int]]:
    """Returns about `num_tokens` token ids of real text, in documents of at least two tokens.

    `text` names a file to use. Otherwise a run's own held-out rows are taken, and for a folder the standard library's.
    """
    folder = find_model_folder(path)
    tokenizer, config = Tokenizer.load(folder), read_config(folder)
    if text is not None:
        try:
            ids = tokenizer.encode(text.read_text(encoding="utf-8"))[:num_tokens]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"Can't read {text} as UTF-8 text: {error}.") from None
        length = min(config.max_position_embeddings, 512)
        documents = [ids[start : start + length] for start in range(0, len(ids), length)]
    else:
        documents = _heldout_rows(_data_config(Path(path), config.max_position_embeddings), tokenizer, num_tokens)
    documents = [document for document in documents if len(document) >= 2]
    if not documents:
        raise UsageError(f"There is no text of two tokens or more in {text or 'the held-out part of the data'}.")
    return documents


def verify(
    folder: str | Path, *, documents: Sequence[Sequence[int]], in_batch_invariant_mode: bool = False
) -> Agreement:
    """Returns how far apart the three are on `documents` (token ids) for the model in `folder`.

    In batch-invariant mode both the trainer's side and the engine run in it.
    """
    folder = find_model_folder(folder)
    decoder = load_decoder(folder)
    scores = _Scores()
    with torch.no_grad(), batch_invariant() if in_batch_invariant_mode else nullcontext():
        logits = _trainer_logits(decoder, documents)
        _score_prompts(decoder, folder, documents, logits, scores, in_batch_invariant_mode=in_batch_invariant_mode)
    with torch.no_grad():
        max_logit, argmax_agreement = _compare_with_transformers(folder, documents, logits)
    return Agreement(
        hf_max_abs_logit=max_logit,
        hf_argmax_agreement=argmax_agreement,
        train_serve_max_abs_logprob=scores.max_difference,
        train_serve_mean_abs_logprob=scores.sum_differences / scores.count,
        num_tokens=scores.count,
        worst=scores.worst,
        batch_invariant=in_batch_invariant_mode,
    )


@dataclass
class _Scores:
    max_difference: float = -1.0
    sum_differences: float = 0.0
    count: int = 0
    places: list[Worst] = field(default_factory=list)

    @property
    def worst(self) -> Worst:
        return self.places[-1]

    def add(self, place: Worst) -> None:
        difference = abs(place.trainer_logprob - place.served_logprob)
        self.sum_differences += difference
        self.count += 1
        if not difference <= self.max_difference:  # a NaN is the worst there is, and stays
            self.max_difference = difference
            self.places.append(place)


def _trainer_logits(decoder: Decoder, documents: Sequence[Sequence[int]]) -> list[Tensor]:
    """All documents in one packed row, as training packs them; returns [T, V] for each."""
    lengths = [len(document) for document in documents]
    tokens_BT = torch.tensor([[token for document in documents for token in document]])
    documents_BT = torch.cat([torch.full((n,), index) for index, n in enumerate(lengths)])[None]
    positions_BT = torch.cat([torch.arange(n) for n in lengths])[None]
    logits_BTV = decoder(
        tokens_BT,
        positions_BT=positions_BT,
        attention=DenseAttention(documents_BT),
        lengths_BT=document_lengths(documents_BT),
    )
    return list(logits_BTV[0].split(lengths))


def _compare_with_transformers(
    folder: Path, documents: Sequence[Sequence[int]], logits: list[Tensor]
) -> tuple[float, float]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    largest, equal, count = 0.0, 0, 0
    for document, ours_TV in zip(documents, logits, strict=True):
        theirs_TV = model(torch.tensor([list(document)])).logits[0]
        largest = max(largest, (ours_TV - theirs_TV).abs().max().item(), key=_nan_last)
        equal += int((ours_TV.argmax(-1) == theirs_TV.argmax(-1)).sum())
        count += len(document)
    return largest, equal / count


def _nan_last(value: float) -> tuple[bool, float]:
    return value != value, value


def _score_prompts(
    decoder: Decoder,
    folder: Path,
    documents: Sequence[Sequence[int]],
    logits: list[Tensor],
    scores: _Scores,
    *,
    in_batch_invariant_mode: bool,
) -> None:
    context = decoder.config.max_position_embeddings
    config = EngineConfig(
        max_model_len=min(context, max(map(len, documents)) + _NUM_NEW_TOKENS),
        max_num_batched_tokens=_CHUNK_TOKENS,
        batch_invariant=in_batch_invariant_mode,
    )
    engine = Engine(decoder, Tokenizer.load(folder), config)
    requests = []
    for index, document in enumerate(documents):
        room = context - len(document) >= _NUM_NEW_TOKENS
        continues = index < _NUM_CONTINUED and room
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=_NUM_NEW_TOKENS if continues else 0,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0,
        )
        requests.append(Request(request_id=str(index), prompt_token_ids=tuple(document), sampling=sampling))
    for index, (document, output) in enumerate(zip(documents, engine.generate(requests), strict=True)):
        if output.error is not None:
            raise ShardlineError(f"The engine could not score document {index}: {output.error}")
        for position, trainer in _logprobs(document, logits[index], first=1):
            served = output.prompt_logprobs[position]
            assert served is not None, "only the first token has no prefix"
            scores.add(_place(index, position, document[position], trainer, served, "prompt"))
        if not output.token_ids:
            continue
        whole = [*document, *output.token_ids]
        for position, trainer in _logprobs(whole, _trainer_logits(decoder, [whole])[0], first=len(document)):
            served = output.logprobs[position - len(document)]
            scores.add(_place(index, position, whole[position], trainer, served, "decode"))


def _logprobs(document: Sequence[int], logits_TV: Tensor, *, first: int) -> list[tuple[int, float]]:
    """Returns (position, log-probability of the token there given what is before it) from position `first` on."""
    targets = torch.tensor(document[first:])
    logprobs = logits_TV[first - 1 : -1].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return list(enumerate(logprobs.tolist(), start=first))


def _place(index: int, position: int, token: int, trainer: float, served: float, stage: str) -> Worst:
    return Worst(
        document=index,
        position=position,
        token_id=token,
        trainer_logprob=trainer,
        served_logprob=served,
        stage=stage,
    )


def _data_config(path: Path, context: int) -> DataConfig:
    for run in (path, path.parent.parent):  # a run, or RUN/checkpoints/step-N
        if (run / "config.yaml").exists() and (run / "checkpoints").exists():
            return load_config(run / "config.yaml").data
    return DataConfig(sequence_length=min(context, 512))


def _heldout_rows(data: DataConfig, tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    _, heldout = prepare_dataset(data, tokenizer, cache_dir=cache_dir())
    documents: list[list[int]] = []
    total = 0
    for row in range(heldout.num_rows):
        batch = heldout.batch([row])
        tokens, owners = batch.tokens_BT[0], batch.documents_BT[0]
        for owner in sorted(set(owners.tolist()) - {-1}):
            documents.append(tokens[owners == owner].tolist()[: num_tokens - total])
            total += len(documents[-1])
            if total >= num_tokens:
                return documents
    return documents
