"""Which packages are installed, which CUDA wheels lie beside them, and what they ask of each other in vain.

    installed(PACKAGES)          # {"torch": "2.13.0", "jax": None, ...}
    cuda_wheels()                # {"nvidia-cudnn-cu12": "9.10.2.21", ...}
    unmet_requirements(...)      # ("vllm 0.11.0 needs torch==2.9.0, and 2.13.0 is installed",)

Only metadata is read; nothing is imported.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

__all__ = ["OWN", "PACKAGES", "cuda_wheels", "installed", "required_versions", "unmet_requirements"]

# What Shardline itself stands on.
OWN = ("torch", "transformers", "numpy", "safetensors")
_OTHERS = (
    "jax",
    "tensorflow",
    "deepspeed",
    "megatron-core",
    "vllm",
    "tensorrt-llm",
    "onnxruntime",
    "onnxruntime-gpu",
    "flash-attn",
    "transformer-engine",
    "xformers",
    "torchvision",
    "torchaudio",
    "triton",
    "bitsandbytes",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-metal",
    "libtpu",
    "tensorflow-metal",
    "torch-xla",
    "torchtune",
    "torchdata",
    "horovod",
    "mxnet",
    "alpa",
    "autoawq",
    "auto-gptq",
    "keras",
    "pynvml",
    "nvidia-ml-py",
)
PACKAGES = OWN + _OTHERS


def installed(names: Iterable[str]) -> dict[str, str | None]:
    """Returns {name: version}, None for what is not installed."""
    return {name: _version(name) for name in names}


def cuda_wheels() -> dict[str, str]:
    """Returns NVIDIA's libraries that are installed as wheels, with the CUDA generation in their names."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("nvidia-") and re.search(r"cudnn|nccl|cublas|cuda-runtime", name):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def unmet_requirements(names: Iterable[str]) -> tuple[str, ...]:
    """Returns sentences about packages of `names` whose own metadata asks for another version of one of `names`."""
    versions = {name: version for name, version in installed(names).items() if version is not None}
    found = []
    for name, version in versions.items():
        for text in importlib.metadata.requires(name) or ():
            try:
                requirement = Requirement(text)
                if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                    continue
                other = requirement.name.lower().replace("_", "-")
                has = versions.get(other)
                if has is None or requirement.specifier.contains(has, prereleases=True):
                    continue
            except (InvalidRequirement, InvalidVersion):  # metadata of before there was a standard
                continue
            found.append(f"{name} {version} needs {other}{requirement.specifier}, and {has} is installed")
    return tuple(found)


def required_versions() -> dict[str, str]:
    """Returns the smallest versions that Shardline's own metadata asks for, so that they stand in one place."""
    try:
        requirements = importlib.metadata.requires("shardline") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return {}
    found = (re.match(r"([\w-]+)>=([\d.]+)$", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in found if match}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
