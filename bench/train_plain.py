"""The benchmark's rival: a Llama decoder and a training loop in plain PyTorch, as one writes them without an engine.

    side = PlainSide("fsdp2", model, rows, sizes)
    loss = side.step()

Nothing here comes from `shardline` but the numbers that describe the model, so that the engine is held against code
that owes it nothing. The parameters have the same names and start from the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

CLIP, LR, BETAS, DECAY = 1.0, 3.0e-4, (0.9, 0.95), 0.1


class Attention(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.head_dim = m.head_dim
        self.q_proj = nn.Linear(m.hidden_size, m.num_heads * m.head_dim, bias=False)
        self.k_proj = nn.Linear(m.hidden_size, m.num_kv_heads * m.head_dim, bias=False)
        self.v_proj = nn.Linear(m.hidden_size, m.num_kv_heads * m.head_dim, bias=False)
        self.o_proj = nn.Linear(m.num_heads * m.head_dim, m.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(m.hidden_size, m.intermediate_size, bias=False)
        self.up_proj = nn.Linear(m.hidden_size, m.intermediate_size, bias=False)
        self.down_proj = nn.Linear(m.intermediate_size, m.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(m.hidden_size, eps=m.norm_eps)
        self.self_attn = Attention(m)
        self.post_attention_layernorm = nn.RMSNorm(m.hidden_size, eps=m.norm_eps)
        self.mlp = MLP(m)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, m: Any, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        if first:
            self.embed_tokens = nn.Embedding(m.vocab_size, m.hidden_size)
        self.layers = nn.ModuleDict({str(index): Layer(m) for index in layers})
        if last:
            self.norm = nn.RMSNorm(m.hidden_size, eps=m.norm_eps)


class PlainDecoder(nn.Module):
    """The whole model, or the layers of one pipeline stage."""

    def __init__(self, m: Any, length: int, layers: range | None = None, *, first: bool = True, last: bool = True):
        super().__init__()
        self.first, self.last = first, last
        self.model = Trunk(m, layers if layers is not None else range(m.num_layers), first=first, last=last)
        if last:
            self.lm_head = nn.Linear(m.hidden_size, m.vocab_size, bias=False)
        frequency = 1.0 / m.rope.theta ** (torch.arange(0, m.head_dim, 2).float() / m.head_dim)
        angle = torch.outer(torch.arange(length).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.model.embed_tokens(x)
        for layer in self.model.layers.values():
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.model.norm(x)) if self.last else x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainSide:
    """One process of a rival. `kind` is a key of `KINDS`."""

    def __init__(
        self, kind: str, m: Any, rows: np.ndarray, *, weights: dict[str, Tensor], batch: int, micro_batches: int
    ) -> None:
        self._rows, self._batch, self._index = rows, batch, 0
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if self._size > 1 else 0
        self._weights, self._m, self._length = weights, m, rows.shape[1] - 1
        self._micro_batches = micro_batches
        self._model: nn.Module = nn.Module()
        self._run: Callable[[Tensor, Tensor], Tensor] = self._plain
        self._splits_batch = kind in ("ddp", "fsdp2", "fsdp2_keep")
        KINDS[kind](self)
        if self._run == self._deepspeed_step:
            return  # it has its own optimizer
        self._optimizer = self._adamw()

    def _adamw(self) -> torch.optim.AdamW:
        parameters = [each for each in self._model.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": DECAY},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=BETAS, fused=True)

    def step(self) -> float:
        tokens, targets = self._next()
        loss = self._run(tokens, targets)
        if self._run != self._deepspeed_step:
            self._clip()
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._index += 1
        return self._mean(loss)

    def _next(self) -> tuple[Tensor, Tensor]:
        start = self._index * self._batch % len(self._rows)
        rows = torch.from_numpy(self._rows[start : start + self._batch])
        if self._splits_batch:
            rows = rows.chunk(self._size)[self._rank]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _plain(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(self._model(tokens), targets)
        loss.backward()
        return loss.detach()

    def _mean(self, loss: Tensor) -> float:
        if self._splits_batch:
            dist.all_reduce(loss, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            loss /= self._size
        return loss.item()

    def _clip(self) -> None:
        """`clip_grad_norm_`, of parameters that may be sharded, replicated, or other stages'."""
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
        sharded = [each for each in gradients if isinstance(each, DTensor)]
        plain = [each for each in gradients if not isinstance(each, DTensor)]
        norms = []
        for group in (sharded, plain):
            if group:
                norm = nn.utils.get_total_norm(group, foreach=True)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        total = torch.stack(norms).square().sum()
        if self._run == self._pipelined:
            dist.all_reduce(total)
        factor = torch.clamp(CLIP / (total.sqrt() + 1e-6), max=1.0)
        local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        torch._foreach_mul_(local, factor)

    def _build(self, layers: range | None = None, *, first: bool = True, last: bool = True) -> PlainDecoder:
        model = PlainDecoder(self._m, self._length, layers, first=first, last=last)
        own = model.state_dict()
        model.load_state_dict({name: self._weights[name] for name in own})
        return model

    def _eager(self) -> None:
        self._model = self._build()

    def _compiled(self) -> None:
        self._model = self._build()
        self._model.compile()

    def _ddp(self) -> None:
        self._model = DistributedDataParallel(self._build(), gradient_as_bucket_view=True)

    def _fsdp2(self, *, reshard: bool = True) -> None:
        model = self._build()
        for layer in model.model.layers.values():
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        self._model = model

    def _fsdp2_keep(self) -> None:
        self._fsdp2(reshard=False)

    def _dtensor(self, *, sequence: bool = False) -> None:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (self._size,))
        between = Shard(1) if sequence else Replicate()
        model = self._build()
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        }
        parts: dict[str, Any] = {
            **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
            **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
            "self_attn.o_proj": RowwiseParallel(output_layouts=between),
            "mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            for name in ("input_layernorm", "post_attention_layernorm"):
                parts[name] = SequenceParallel()
            parts["self_attn"] = PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            )
            parts["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan["model.norm"] = SequenceParallel()
        for layer in model.model.layers.values():
            parallelize_module(layer, mesh, parts)
        parallelize_module(model, mesh, plan)
        self._model = model
        self._run = self._loss_parallel

    def _dtensor_sequence(self) -> None:
        self._dtensor(sequence=True)

    def _loss_parallel(self, tokens: Tensor, targets: Tensor) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            loss = cross_entropy(self._model(tokens), targets)
            loss.backward()
        loss = loss.detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _pipeline(self, *, zero_bubble: bool = False, shard: bool = False) -> None:
        """Stages of equally many layers; in pairs like a V with zero bubble. `shard`: each stage under FSDP2."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

        device, group, rank, num_ranks = torch.device("cpu"), None, self._rank, self._size
        if shard:
            mesh = init_device_mesh("cpu", (2, self._size // 2), mesh_dim_names=("pipeline", "data"))
            group, rank, num_ranks = mesh["pipeline"].get_group(), mesh["pipeline"].get_local_rank(), 2
            self._batch_part = (mesh["data"].size(), mesh["data"].get_local_rank())
        count = num_ranks * (2 if zero_bubble else 1)
        indices = [rank, count - 1 - rank] if zero_bubble else [rank]
        depth = self._m.num_layers
        modules = nn.ModuleList()
        stages = []
        for index in indices:
            layers = range(index * depth // count, (index + 1) * depth // count)
            module = self._build(layers, first=index == 0, last=index == count - 1)
            if shard:
                for layer in module.model.layers.values():
                    fully_shard(layer, mesh=mesh["data"])
                fully_shard(module, mesh=mesh["data"])
            modules.append(module)
            stages.append(PipelineStage(module, index, count, device, group=group))
        self._model = modules
        self._is_last = count - 1 in indices
        self._is_first = 0 in indices
        self._schedule: Any = (
            ScheduleZBVZeroBubble(stages, self._micro_batches, loss_fn=cross_entropy)
            if zero_bubble
            else Schedule1F1B(stages[0], self._micro_batches, loss_fn=cross_entropy)
        )
        self._run = self._pipelined

    def _zero_bubble(self) -> None:
        self._pipeline(zero_bubble=True)

    def _sharded_pipeline(self) -> None:
        self._pipeline(shard=True)

    def _deepspeed(self, stage: int) -> None:
        """DeepSpeed's engine with PyTorch's fused AdamW, which it deals out; clipping is its own."""
        import os

        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # pyrefly: ignore  it has an environment of its own

        deepspeed.init_distributed(dist_backend="gloo")
        self._model = self._build()
        self._engine, *_ = deepspeed.initialize(
            model=self._model,
            optimizer=self._adamw(),
            config={
                "train_batch_size": self._batch,
                "train_micro_batch_size_per_gpu": self._batch // self._size,
                "gradient_clipping": CLIP,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )
        self._splits_batch = True
        self._run = self._deepspeed_step

    def _deepspeed_step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(self._engine(tokens), targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach().clone()

    def _pipelined(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if hasattr(self, "_batch_part"):
            size, rank = self._batch_part
            tokens, targets = tokens.chunk(size)[rank].contiguous(), targets.chunk(size)[rank].contiguous()
        losses: list[Tensor] = []
        inputs = (tokens,) if self._is_first else ()
        self._schedule.step(*inputs, **({"target": targets, "losses": losses} if self._is_last else {}))
        total = torch.stack([each.detach() for each in losses]).mean() if self._is_last else torch.zeros(())
        dist.all_reduce(total)
        return total / (self._batch_part[0] if hasattr(self, "_batch_part") else 1)


KINDS: dict[str, Callable[[PlainSide], None]] = {
    "eager": PlainSide._eager,
    "compiled": PlainSide._compiled,
    "ddp": PlainSide._ddp,
    "fsdp2": PlainSide._fsdp2,
    "fsdp2_keep": PlainSide._fsdp2_keep,
    "dtensor": PlainSide._dtensor,
    "dtensor_sequence": PlainSide._dtensor_sequence,
    "pipelining": PlainSide._pipeline,
    "pipelining_zbv": PlainSide._zero_bubble,
    "pipelining_fsdp2": PlainSide._sharded_pipeline,
    "deepspeed1": lambda side: side._deepspeed(1),
    "deepspeed2": lambda side: side._deepspeed(2),
    "deepspeed3": lambda side: side._deepspeed(3),
}
