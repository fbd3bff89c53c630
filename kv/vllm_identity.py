"""Which blocks of a vLLM engine are interchangeable: its namespace, and a request's extra keys.

Not vLLM's own block hash: that one may depend on the process, and does not say which model, weights
or memory layout a block belongs to. The namespace holds everything that decides the bytes of a
block but tokens, LoRA and salt; when in doubt it separates, which costs hits and never data:

* the model's name with a digest of its configuration (as overridden by the user);
* the revision of the weights: ``weights_revision`` of the extra configuration, or the engine's
  ``revision``, or for a local folder a fingerprint of names, sizes and times of its files;
* dtype, KV-cache dtype, quantization; block size; TP rank and size;
* the layout: vLLM's version, device, attention backend, the shape of a block, and on a CPU the
  architecture and vector instructions, on which the packing of K depends.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cxlbench.kv.identity import ExtraKey, IdentityError, Namespace

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json")


def namespace_of(vllm_config: Any, kv_cache_config: Any, extra: Mapping[str, Any]) -> Namespace:
    """Return the namespace of an engine's blocks.

    ``extra`` is ``kv_connector_extra_config``: its ``weights_revision`` and ``salt`` are used.

    Raises:
        IdentityError: the revision of the weights is not known.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return Namespace(
        model=f"{model.model}#{_config_digest(model)}",
        weights_revision=_weights_revision(vllm_config, extra),
        dtype=f"{model.dtype}/{cache.cache_dtype}/{model.quantization}",
        kv_layout=_layout(vllm_config, kv_cache_config),
        block_tokens=spec.block_size,
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        salt=str(extra.get("salt", "")),
    )


def extra_keys_of(request: Any) -> tuple[ExtraKey, ...] | None:
    """Return what of a vLLM request, besides tokens, decides its KV; None: do not cache it.

    Not cached are inputs that are not all tokens (images, audio, embeddings), and streaming
    sessions, whose tokens are revised.
    """
    if getattr(request, "mm_features", None) or getattr(request, "prompt_embeds", None) is not None:
        return None
    if getattr(request, "prompt_is_token_ids", None) is not None:
        return None
    if getattr(request, "resumable", False):
        return None
    lora = getattr(request, "lora_request", None)
    adapter = (None, None) if lora is None else (lora.lora_name, lora.lora_path)
    return (*adapter, getattr(request, "cache_salt", None))


def block_bytes_of(kv_cache_config: Any) -> int:
    """Return the bytes of one block over all layers, from the engine's configuration."""
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    page = getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)
    return int(page) * len(group.layer_names)


def _config_digest(model: Any) -> str:
    described = dict(model.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        described.pop(name, None)
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights_revision(vllm_config: Any, extra: Mapping[str, Any]) -> str:
    model = vllm_config.model_config
    given = extra.get("weights_revision") or model.revision
    if given:
        return str(given)
    if str(vllm_config.load_config.load_format) == "dummy":
        return f"dummy weights, seed {model.seed}"
    path = Path(model.model)
    if path.is_dir():
        files = sorted({file for pattern in _WEIGHT_FILES for file in path.glob(pattern)})
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise IdentityError(
            f"the revision of the weights of {model.model!r} is not known, and blocks of different "
            "weights must not mix: give the engine a revision, or set weights_revision in "
            "kv_connector_extra_config"
        )
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return f"files {digest.hexdigest()[:32]}"


def _layout(vllm_config: Any, kv_cache_config: Any) -> str:
    import torch
    import vllm
    from vllm.platforms import current_platform

    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    attention = getattr(vllm_config, "attention_config", None)
    parts = [
        f"vllm {vllm.__version__}",
        f"device {current_platform.device_type}",
        f"backend {getattr(attention, 'backend', None)}",
        f"order {getattr(kv_cache_config, 'kv_cache_layout', None)}",
        f"{len(group.layer_names)} layers of {type(spec).__name__}",
        f"{spec.block_size} tokens, {spec.page_size_bytes} bytes",
        f"{getattr(spec, 'num_kv_heads', None)} heads of {getattr(spec, 'head_size', None)}",
    ]
    if current_platform.is_cpu():
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: None)()
        capability = torch.backends.cpu.get_cpu_capability()
        parts.append(f"cpu {platform.machine()} {capability} amx {amx}")
    return "; ".join(parts)
