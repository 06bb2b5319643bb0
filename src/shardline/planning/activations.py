"""Bytes that a training step keeps between forward and backward, counted from our own decoder's operations.

    kept = layer_bytes(model, layer=0, rows=2, sequence_length=512, arithmetic="fp32")

These are the tensors that autograd saves, each storage once; the tests run the real decoder and compare the sums.
The arithmetic is `fp32`, `bf16` (parameters are gathered in bf16) or `autocast` (fp32 parameters; each linear casts
its input and its weight, and keeps the casts). A mixture keeps the same whatever its routes: every token reaches
exactly its k experts.

A tensor rank's part is counted as the smaller model that it is (`planning.parts.tensor_part`). With sequence
parallelism the norms and the residual stream hold 1 / `sequence_ranks` of the tokens; what linears read is gathered.

Symbols as in the decoder: B rows, T tokens of a row, D hidden, N and K heads, H head size, F inner width, E experts,
V vocabulary. `element` is a matrix product's, `stream` the residual stream's bytes of one number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardline.planning.parameters import count_parameters

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig

__all__ = [
    "Arithmetic",
    "element_bytes",
    "inner_bytes",
    "layer_backward_bytes",
    "layer_bytes",
    "layer_forward_bytes",
    "linear_input_bytes",
    "linear_output_bytes",
    "outer_bytes",
    "stream_bytes",
    "wide_tensors",
]

Arithmetic = Literal["fp32", "bf16", "autocast"]
_FP32, _BF16, _INT64 = 4, 2, 8


def layer_bytes(
    model: DecoderConfig,
    *,
    layer: int,
    rows: int,
    sequence_length: int,
    arithmetic: Arithmetic,
    packed: bool = True,
    sequence_ranks: int = 1,
) -> int:
    """Returns the bytes that one decoder layer saves for `rows` rows of `sequence_length` tokens.

    `packed`: a row may hold several documents, so that attention gets a boolean mask for every row. A window alone, or
    ALiBi, needs one mask, the same for all rows.
    """
    hidden, stream = model.hidden_size, stream_bytes(arithmetic)
    window = model.sliding_windows[layer]
    masked = packed or model.position == "alibi" or (window is not None and window < sequence_length)
    mask_rows = rows if packed else int(masked)
    tokens = rows * sequence_length
    before = 1 if model.block == "parallel" else 2  # norms whose output linears read
    of_sequence = tokens // sequence_ranks
    total = of_sequence * before * _norm_bytes(model, hidden, arithmetic, stream=stream)
    if model.output_norms:
        total += of_sequence * 2 * _norm_bytes(model, hidden, arithmetic, stream=element_bytes(arithmetic))
    num_offsets = before + 2 * model.output_norms
    total += num_offsets * _offset_bytes(model, hidden)
    # Queries, keys and values read one tensor, the feed-forward another; in a parallel block it is the same one, unless
    # each gathers it.
    total += tokens * _inputs_bytes(hidden, 3, arithmetic)
    total += _attention_bytes(
        model, mask_rows=mask_rows, tokens=tokens, sequence_length=sequence_length, arithmetic=arithmetic
    )
    if model.routes(layer):
        total += _mixture_bytes(model, rows=rows, tokens=tokens, arithmetic=arithmetic)
    else:
        shared = model.block == "parallel" and arithmetic != "autocast" and sequence_ranks == 1
        total += 0 if shared else tokens * _inputs_bytes(hidden, 2 if model.gated else 1, arithmetic)
        total += tokens * _inner_bytes(model, model.intermediate_size, arithmetic)
    if arithmetic == "autocast":
        router = hidden * model.num_experts if model.routes(layer) else 0  # it stays in fp32
        total += (count_parameters(model).layers[layer].all_matrices - router) * _BF16
    return total


def outer_bytes(
    model: DecoderConfig,
    *,
    rows: int,
    sequence_length: int,
    arithmetic: Arithmetic,
    is_first: bool = True,
    is_last: bool = True,
    sequence_ranks: int = 1,
) -> int:
    """Returns the bytes kept outside the layers of a pipeline stage: ids, embedding norm and projections on the first,
    cos and sin on each, the final norm and what the head reads on the last, what is sent on the others.
    """
    hidden, width, stream = model.hidden_size, model.embedding_width, stream_bytes(arithmetic)
    tokens = rows * sequence_length
    per_token, of_sequence, total = 0, 0, 0
    if is_first:
        per_token += _INT64
        if model.position == "learned":
            per_token += _INT64
        if model.embedding_scale != 1.0:
            total += stream
        if model.embedding_norm:
            per_token += _norm_bytes(model, width, arithmetic, stream=stream)
            total += _offset_bytes(model, width)
        if width != hidden:
            per_token += _inputs_bytes(width, 1, arithmetic)
            total += width * hidden * _BF16 if arithmetic == "autocast" else 0
    elif arithmetic != "fp32":
        of_sequence += hidden * _BF16  # as it came, before the norm makes it fp32
    if is_last:
        if model.final_norm:
            of_sequence += _norm_bytes(model, hidden, arithmetic, stream=stream)
            total += _offset_bytes(model, hidden)
        projected = width != hidden
        per_token += width * (_BF16 if projected and arithmetic == "autocast" else stream)  # what the head reads
        if projected:
            per_token += _inputs_bytes(hidden, 1, arithmetic)
            total += width * hidden * _BF16 if arithmetic == "autocast" else 0
    else:
        of_sequence += hidden * stream
    if model.num_experts:  # the balance loss: which tokens count, and what each row's is worth
        per_token += 1
        total += rows * _FP32
    if model.position == "rope" and _turns_in_fp32(model, arithmetic):
        ropes = {model.rope_of(layer) for layer in range(model.num_layers)}
        per_token += sum(2 * rope.num_dims(model.head_dim) * _FP32 for rope in ropes)
    return total + tokens * per_token + tokens // sequence_ranks * of_sequence


def layer_forward_bytes(
    model: DecoderConfig, *, layer: int, rows: int, sequence_length: int, arithmetic: Arithmetic
) -> int:
    """Returns by how much the last layer's forward pass exceeds what it saves in the end: ALiBi's bias, in fp32 before
    it is masked and cast, when the feed-forward's tensors are not there yet.
    """
    if model.position != "alibi":
        return 0
    bias = model.num_heads * sequence_length**2 * _FP32
    masked = 0 if arithmetic == "fp32" else rows * bias
    return max(0, bias + masked - inner_bytes(model, layer, rows * sequence_length, arithmetic))


def layer_backward_bytes(
    model: DecoderConfig, *, layer: int, rows: int, sequence_length: int, arithmetic: Arithmetic
) -> int:
    """Returns by how much one layer's backward pass exceeds what the forward passes saved; as it goes on, it frees.

    Feed-forward: the gradients of its output, of the widest inner tensor and of the last matrix; those that follow
    take the place of saved tensors. In a mixture three of the output's size (the experts' inputs are summed in turn)
    and one expert's, on its even share B T k / E of the tokens: how uneven the routes are is not known here. Capped
    scores are no fused kernel: their gradients, when the feed-forward's tensors are gone.
    """
    element, tokens = element_bytes(arithmetic), rows * sequence_length
    hidden = model.hidden_size
    if model.routes(layer):
        expert_tokens = tokens * model.experts_per_token // model.num_experts
        elements = 3 * tokens * hidden + expert_tokens * (hidden + model.expert_size) + hidden * model.expert_size
    else:
        elements = tokens * (hidden + model.intermediate_size) + hidden * model.intermediate_size
    if model.attention_softcap is None:
        return elements * element
    scores = tokens * sequence_length * model.num_heads * (2 * _FP32 if arithmetic == "fp32" else _FP32 + _BF16)
    return max(elements * element, scores - inner_bytes(model, layer, tokens, arithmetic))


def wide_tensors(
    model: DecoderConfig, *, layer: int, rows: int, sequence_length: int, arithmetic: Arithmetic
) -> list[tuple[int, int]]:
    """Returns, of one layer's saved tensors that are wider than the residual stream, (bytes of one, bytes of all):
    those inside the feed-forward (of an expert with its even share), and scores where no fused kernel hides them.
    """
    element, tokens = element_bytes(arithmetic), rows * sequence_length
    if model.routes(layer):
        block = tokens * model.experts_per_token * model.expert_size * element // model.num_experts
    else:
        block = tokens * model.intermediate_size * element
    groups = [(block, inner_bytes(model, layer, tokens, arithmetic))]
    scores = tokens * sequence_length * model.num_heads
    if model.attention_softcap is not None:
        groups.append((scores * element, scores * _capped_score_bytes(arithmetic)))
    elif model.position == "alibi":
        groups.append((scores * element, scores * element))
    return groups


def element_bytes(arithmetic: Arithmetic) -> int:
    """Returns the bytes of one number in a matrix product."""
    return _FP32 if arithmetic == "fp32" else _BF16


def stream_bytes(arithmetic: Arithmetic) -> int:
    """Returns the bytes of one number of the residual stream."""
    return _BF16 if arithmetic == "bf16" else _FP32


def _turns_in_fp32(model: DecoderConfig, arithmetic: Arithmetic) -> bool:
    """Whether queries and keys are fp32 when they turn, so that all layers share cos and sin. Else each layer casts
    them anew, for queries and for keys. Under autocast a plain RMS norm's fp32 weight makes its output fp32.
    """
    by_norm = model.qk_norm and model.norm == "rms" and not model.norm_offset
    return arithmetic == "fp32" or (arithmetic == "autocast" and by_norm)


def _norm_bytes(model: DecoderConfig, width: int, arithmetic: Arithmetic, *, stream: int) -> int:
    """One vector's; the output belongs to who reads it.

    RMS: the input in fp32, 1 / rms, and the normed input (in fp32 where 1 + w multiplies it). LayerNorm: the input, its
    mean and 1 / deviation.
    """
    if model.norm == "layer":
        return width * stream + 2 * (_BF16 if arithmetic == "bf16" else _FP32)
    return width * (_FP32 + (_FP32 if model.norm_offset else stream)) + _FP32


def _offset_bytes(model: DecoderConfig, width: int) -> int:
    """1 + w, a new tensor."""
    return width * _FP32 if model.norm_offset else 0


def _inputs_bytes(width: int, num_linears: int, arithmetic: Arithmetic) -> int:
    """What linears that read one vector of `width` keep of it: it once, or a cast for each."""
    return num_linears * width * _BF16 if arithmetic == "autocast" else width * element_bytes(arithmetic)


def _inner_bytes(model: DecoderConfig, size: int, arithmetic: Arithmetic) -> int:
    """Gate, act(gate), up and their product, or up and act(up); relu's backward reads its output, not its input."""
    num_tensors = (4 if model.gated else 2) - (model.activation == "relu")
    return num_tensors * size * element_bytes(arithmetic)


def inner_bytes(model: DecoderConfig, layer: int, tokens: int, arithmetic: Arithmetic) -> int:
    """Returns what one layer's feed-forward keeps between its linears."""
    if model.routes(layer):
        return tokens * model.experts_per_token * _inner_bytes(model, model.expert_size, arithmetic)
    return tokens * _inner_bytes(model, model.intermediate_size, arithmetic)


def _attention_bytes(
    model: DecoderConfig, *, mask_rows: int, tokens: int, sequence_length: int, arithmetic: Arithmetic
) -> int:
    element = element_bytes(arithmetic)
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    per_token, total = 0, 0
    if model.qk_norm:  # the norm's own output is not kept: the rotation's is
        heads = model.num_heads + model.num_kv_heads
        per_token += heads * _norm_bytes(model, model.head_dim, arithmetic, stream=element)
        total += 2 * _offset_bytes(model, model.head_dim)
    if model.position == "rope" and not _turns_in_fp32(model, arithmetic):
        per_token += 4 * model.rope.num_dims(model.head_dim) * element
    mask = mask_rows * sequence_length**2
    blind = mask_rows * sequence_length  # one boolean a query: whether it sees anything
    if model.attention_softcap is not None:
        # Queries, keys and values copied for every head; output; scores.
        per_token += 4 * queries * element
        per_token += model.num_heads * sequence_length * _capped_score_bytes(arithmetic)
        return total + tokens * per_token + max(mask, sequence_length**2) + max(blind, sequence_length)
    per_token += (2 * queries + 2 * keys) * element + model.num_heads * _FP32  # q, k, v, output; log-sum-exp
    if model.position == "alibi":
        # The bias is a mask of its own for every head; the output is copied with zeros where a query sees nothing.
        return total + tokens * (per_token + queries * element) + mask * model.num_heads * element + blind
    return total + tokens * per_token + mask * element  # PyTorch makes the boolean mask one of the compute dtype


def _capped_score_bytes(arithmetic: Arithmetic) -> int:
    """Of one score: its tanh, its weight in fp32, and that cast."""
    return element_bytes(arithmetic) + _FP32 + (0 if arithmetic == "fp32" else _BF16)


def _mixture_bytes(model: DecoderConfig, *, rows: int, tokens: int, arithmetic: Arithmetic) -> int:
    """The router's input in fp32, its probabilities and choices; k times an expert's gathered input, inner tensors
    and output; where the tokens of each expert are; the load-balancing loss.
    """
    hidden, experts, chosen = model.hidden_size, model.num_experts, model.experts_per_token
    stream = stream_bytes(arithmetic)
    per_token = hidden * _FP32 + experts * _FP32 + chosen * _INT64
    if model.normalize_expert_weights:
        per_token += chosen * _FP32 + _FP32
    per_expert = _inputs_bytes(hidden, 2 if model.gated else 1, arithmetic)
    per_expert += _inner_bytes(model, model.expert_size, arithmetic)
    per_expert += hidden * element_bytes(arithmetic) + stream  # its output, and the weight that multiplies it
    per_expert += hidden * stream  # the product: index_add keeps what it adds
    per_expert += 2 * _INT64
    total = tokens * (per_token + chosen * per_expert)
    if arithmetic == "bf16":
        total += hidden * experts * _FP32  # the router's weight
    return total + rows * (experts * _FP32 + _INT64)


def linear_input_bytes(model: DecoderConfig, *, layer: int, tokens: int, arithmetic: Arithmetic) -> int:
    """Returns the bytes of what one layer's linears read."""
    hidden, queries = model.hidden_size, model.num_heads * model.head_dim
    per_token = _inputs_bytes(hidden, 3, arithmetic) + queries * element_bytes(arithmetic)
    per_token += sum(
        times * (_inputs_bytes(hidden, 2 if model.gated else 1, arithmetic) + size * element_bytes(arithmetic))
        for times, size in (_feedforward_of(model, layer),)
    )
    return tokens * per_token


def linear_output_bytes(model: DecoderConfig, *, layer: int, tokens: int, arithmetic: Arithmetic) -> int:
    """Returns the bytes of what one layer's linears give; its gradients take the same."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    times, size = _feedforward_of(model, layer)
    inner = times * (size * (2 if model.gated else 1) + model.hidden_size)
    return tokens * (queries + 2 * keys + model.hidden_size + inner) * element_bytes(arithmetic)


def _feedforward_of(model: DecoderConfig, layer: int) -> tuple[int, int]:
    """(how many a token meets, inner width)."""
    return (model.experts_per_token, model.expert_size) if model.routes(layer) else (1, model.intermediate_size)
