"""`/v1/embeddings`: texts become vectors of length 1, from the decoder's hidden states after its last norm.

    {"input": ["one text", "another"], "pooling": "mean", "encoding_format": "float"}

`pooling` is `mean` over a text's tokens (the default) or the `last` token. OpenAI's base64 form is float32, little
endian. A long list goes through the engine in parts, so that it can't fill the queue by itself.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import uuid
from typing import Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from shardline.serving.async_engine import AsyncEngine
from shardline.serving.completions import Completions
from shardline.serving.disconnect import while_connected
from shardline.serving.errors import RequestError
from shardline.serving.requests import FinishReason, Request, RequestOutput, SamplingParams

__all__ = ["EmbeddingBody", "Embeddings"]

MAX_INPUTS = 2048  # OpenAI's


class EmbeddingBody(msgspec.Struct, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None


class Embeddings:
    """The endpoint over one engine."""

    def __init__(self, async_engine: AsyncEngine, completions: Completions, *, model_name: str) -> None:
        self._async_engine = async_engine
        self._completions = completions
        self._model_name = model_name
        self._size = async_engine.engine.decoder.config.hidden_size

    async def embed(self, http: HttpRequest, body: EmbeddingBody, headers: dict[str, str]) -> Response:
        """Answers `/v1/embeddings`."""
        if body.dimensions not in (None, self._size):
            raise RequestError(
                f"dimensions = {body.dimensions}, but this model's vectors have {self._size} and can't be cut; "
                "leave it out.",
                param="dimensions",
            )
        prompts = [await self._completions.encode_prompt(item) for item in _inputs(body)]
        name = f"embd-{uuid.uuid4().hex}"
        requests = [
            Request(
                request_id=f"{name}-{index}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=0),
                pooling=body.pooling or "mean",
                adapter=self._async_engine.engine.adapter_of(body.model),
            )
            for index, prompt in enumerate(prompts)
        ]
        for request in requests:  # all are looked at before the first is computed
            self._check(request)
        outputs = await while_connected(http.receive, self._run(requests))
        content = await asyncio.to_thread(
            self._encode,
            outputs,
            sum(map(len, prompts)),
            model=body.model or self._model_name,
            as_text=body.encoding_format == "base64",
        )
        return Response(content, media_type="application/json", headers={**headers, "x-request-id": name})

    def _encode(self, outputs: list[RequestOutput], num_tokens: int, *, model: str, as_text: bool) -> bytes:
        """Returns the answer's body; for many vectors it takes longer than the event loop should be away."""
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(output.embedding) if as_text else output.embedding,
            }
            for index, output in enumerate(outputs)
        ]
        content: dict[str, Any] = {
            "object": "list",
            "data": data,
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return msgspec.json.encode(content)

    def _check(self, request: Request) -> None:
        try:
            self._async_engine.engine.check(request)
        except RequestError as error:
            raise RequestError(str(error), param="input", code=error.code) from None

    async def _run(self, requests: list[Request]) -> list[RequestOutput]:
        whole = []
        at_once = self._async_engine.engine.config.max_num_seqs
        for first in range(0, len(requests), at_once):
            part = requests[first : first + at_once]
            answers = self._async_engine.submit(part)
            outputs: dict[str, RequestOutput] = {}
            try:
                async for output in answers:
                    if output.finish_reason is FinishReason.ERROR:
                        raise answers.failure(output)
                    outputs[output.request_id] = output
            finally:
                answers.close()
            whole += [outputs[request.request_id] for request in part]
        return whole


def _inputs(body: EmbeddingBody) -> list[str | list[int]]:
    """Returns the texts or lists of token ids to embed."""
    if isinstance(body.input, str):
        return [body.input]
    texts = [item for item in body.input if isinstance(item, str)]
    ids = [item for item in body.input if isinstance(item, int)]
    lists = [item for item in body.input if isinstance(item, list)]
    if not body.input:
        raise RequestError("input is empty; send a text or token ids.", param="input")
    if len(body.input) not in (len(texts), len(ids), len(lists)):
        raise RequestError("input mixes texts and token ids in one list; send one kind.", param="input")
    if ids:
        return [ids]
    if len(body.input) > MAX_INPUTS:
        raise RequestError(f"input has {len(body.input)} items; at most {MAX_INPUTS} are taken at once.", param="input")
    return [*texts, *lists]


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
